/* Rows of scores and the groups of thread blocks that take them in turn, in upstream's radix top-k: for launch code with an OP. */
#ifndef KSEAL_TOPK_REGIONS_ROWS_H
#define KSEAL_TOPK_REGIONS_ROWS_H

#include "check.h"
#include "whole.h"

#define ADDRESS_END ((int64_t)1 << 57)  /* bytes that an address can reach */
#define ARRIVALS_END ((int64_t)1 << 31) /* a group counts the arrivals of its blocks as int32 */
#define BARRIERS_PER_ROW 7 /* most that a row needs: one a round of 8 bits, the others at its beginning and where it is written */

/* Writes the stride to use: `given` elements, or `width` where that is 0. */
static inline kseal_status check_stride(const char *name, int64_t given, const char *width_name, int64_t width, int64_t rows,
                                        int64_t elem_bytes, int64_t *stride) {
    *stride = given != 0 ? given : width;
    if (*stride < width)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be 0 or at least %s, %lld", name, (long long)given, width_name,
               (long long)width);
    if (!product_below(ADDRESS_END / elem_bytes, *stride, rows, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; %lld rows must end below 2^57 bytes", name, (long long)given, (long long)rows);
    return KSEAL_OK;
}

/* `groups` of `ctas` thread blocks, of which `most` run at once, for `rows` rows: those of the field `name` with this value. */
static inline kseal_status check_groups(const char *name, int64_t value, int64_t rows, int64_t max_len, int64_t groups,
                                        int64_t ctas, int64_t most) {
    if (ctas > most)
        REFUSE(KSEAL_OVERFLOW, "max_len is %lld; it needs %lld thread blocks at once, up to %lld are supported on this device",
               (long long)max_len, (long long)ctas, (long long)most);
    if (ctas > 1 && !product_below(ARRIVALS_END, div_up(rows, groups) * BARRIERS_PER_ROW + 1, ctas, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; groups of %lld thread blocks can take %lld rows in turn (max_len is %lld)", name,
               (long long)value, (long long)ctas, (long long)(((ARRIVALS_END - 1) / ctas - 1) / BARRIERS_PER_ROW * groups),
               (long long)max_len);
    return KSEAL_OK;
}

#endif
