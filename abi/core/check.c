#include "check.h"

#include <math.h>

#include "whole.h"

#define REFUSE_NAMED(status, text, ...) return kseal_fail(status, "%s: %s is " text, op, name, __VA_ARGS__)

kseal_status kseal_check_zero(const char *op, const char *name, int64_t value, const char *why) {
    if (value != 0)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%lld; it must be 0, since %s", (long long)value, why);
    return KSEAL_OK;
}

kseal_status kseal_check_flag(const char *op, const char *name, uint32_t value) {
    if (value > 1)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%u; it must be 0 or 1", value);
    return KSEAL_OK;
}

kseal_status kseal_check_positive(const char *op, const char *name, int64_t value) {
    if (value <= 0)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%lld; it must be positive", (long long)value);
    return KSEAL_OK;
}

kseal_status kseal_check_not_negative(const char *op, const char *name, int64_t value) {
    if (value < 0)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%lld; it must not be negative", (long long)value);
    return KSEAL_OK;
}

kseal_status kseal_check_range(const char *op, const char *name, int64_t value, int64_t from, int64_t to) {
    if (value < from || value > to)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%lld; it must be from %lld to %lld", (long long)value, (long long)from,
                     (long long)to);
    return KSEAL_OK;
}

kseal_status kseal_check_below(const char *op, const char *name, int64_t value, int bits) {
    if (value >= (int64_t)1 << bits)
        REFUSE_NAMED(KSEAL_OVERFLOW, "%lld; it must be below 2^%d", (long long)value, bits);
    return KSEAL_OK;
}

kseal_status kseal_check_scale(const char *op, const char *name, float value) {
    if (!isfinite(value) || value == 0.0f)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%g; it must be finite and not 0", (double)value);
    return KSEAL_OK;
}

kseal_status kseal_check_positive_scale(const char *op, const char *name, float value) {
    if (!isfinite(value) || !(value > 0.0f))
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%g; it must be finite and above 0", (double)value);
    return KSEAL_OK;
}

kseal_status kseal_check_stride(const char *op, const char *name, int64_t given, int64_t dense, int32_t unit, int64_t *stride) {
    *stride = given != 0 ? given : dense;
    if (*stride < dense)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%lld; it must be at least %lld, or 0 for that", (long long)given,
                     (long long)dense);
    if (*stride % unit != 0)
        REFUSE_NAMED(KSEAL_MISALIGNED, "%lld; it must be a multiple of %d", (long long)given, unit);
    return KSEAL_OK;
}

kseal_status kseal_check_max_pages(const char *op, int64_t max_pages_per_seq, int64_t page_size) {
    const char *name = "max_pages_per_seq";
    kseal_status status = kseal_check_positive(op, name, max_pages_per_seq);
    if (status == KSEAL_OK && !product_below((int64_t)1 << 31, max_pages_per_seq, page_size, 1))
        REFUSE_NAMED(KSEAL_OVERFLOW, "%lld; max_pages_per_seq * page_size must be below 2^31 (page_size is %lld)",
                     (long long)max_pages_per_seq, (long long)page_size);
    return status;
}

kseal_status kseal_check_room(const char *op, const char *name, uint64_t given, uint64_t needed) {
    if (given < needed)
        REFUSE_NAMED(KSEAL_WORKSPACE_TOO_SMALL, "%llu; %llu are needed", (unsigned long long)given, (unsigned long long)needed);
    return KSEAL_OK;
}

static kseal_status check_pointer(const char *op, const struct kseal_pointer *p) {
    const char *name = p->name;
    if (p->value == NULL && p->presence == KSEAL_NEEDED)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "null; it is needed%s%s", p->since != NULL ? ", since " : "",
                     p->since != NULL ? p->since : "");
    if (p->value != NULL && p->presence == KSEAL_UNWANTED)
        REFUSE_NAMED(KSEAL_INVALID_ARGUMENT, "%p; it must be null, since %s", p->value, p->since);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE_NAMED(KSEAL_MISALIGNED, "%p; it must be aligned to %u bytes", p->value, p->align);
    return KSEAL_OK;
}

kseal_status kseal_check_pointers(const char *op, const struct kseal_pointer *pointers, size_t count) {
    kseal_status status = KSEAL_OK;
    for (size_t i = 0; i < count && status == KSEAL_OK; i++)
        status = check_pointer(op, &pointers[i]);
    return status;
}
