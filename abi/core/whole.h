/* Arithmetic on sizes, none of them negative, for launch code: so small that the names have no prefix. */
#ifndef KSEAL_CORE_WHOLE_H
#define KSEAL_CORE_WHOLE_H

#include <stdbool.h>
#include <stdint.h>

static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t div_up(int64_t value, int64_t unit) { return value / unit + (value % unit != 0); }
static inline int64_t round_up(int64_t value, int64_t unit) { return div_up(value, unit) * unit; }
static inline int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }

/* Whether a * b * c is below `end`. */
static inline bool product_below(int64_t end, int64_t a, int64_t b, int64_t c) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product) && product < end;
}

#endif
