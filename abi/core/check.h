/*
 * What launch code of several ops checks of a run's arguments. A launch.c defines OP, the name of its op, with which every
 * message begins; then come the field, its value and what is supported.
 */
#ifndef KSEAL_CORE_CHECK_H
#define KSEAL_CORE_CHECK_H

#include "error.h"

/* Why a field is as it must be, where that follows from a boolean axis of the config: `p->axis`. */
#define SINCE(p, axis) ((p)->axis ? "config." #axis " is 1" : "config." #axis " is 0")

/* Returns from the function: with a status and a message, or with the status of a check that failed. */
#define REFUSE(status, ...) return kseal_fail(status, OP ": " __VA_ARGS__)
#define CHECK(check)                                                                                                       \
    do {                                                                                                                   \
        kseal_status check_status = (check);                                                                               \
        if (check_status != KSEAL_OK)                                                                                      \
            return check_status;                                                                                           \
    } while (0)

/* `why` ends the sentence "it must be 0, since". */
kseal_status kseal_check_zero(const char *op, const char *name, int64_t value, const char *why);
kseal_status kseal_check_flag(const char *op, const char *name, uint32_t value);
kseal_status kseal_check_positive(const char *op, const char *name, int64_t value);
kseal_status kseal_check_not_negative(const char *op, const char *name, int64_t value);
kseal_status kseal_check_range(const char *op, const char *name, int64_t value, int64_t from, int64_t to);

/* Fails with KSEAL_OVERFLOW where `value` is not below 2^bits. */
kseal_status kseal_check_below(const char *op, const char *name, int64_t value, int bits);

/* A factor that may have either sign, and one that may not. */
kseal_status kseal_check_scale(const char *op, const char *name, float value);
kseal_status kseal_check_positive_scale(const char *op, const char *name, float value);

/*
 * Writes the stride to use: `given`, or `dense` where that is 0. It is at least `dense` and a multiple of `unit`; how large it
 * may be is for the op to say.
 */
kseal_status kseal_check_stride(const char *op, const char *name, int64_t given, int64_t dense, int32_t unit, int64_t *stride);

/* Columns of a page table with int32 positions. */
kseal_status kseal_check_max_pages(const char *op, int64_t max_pages_per_seq, int64_t page_size);

/* Fails with KSEAL_WORKSPACE_TOO_SMALL where `given` bytes are fewer than `needed`. */
kseal_status kseal_check_room(const char *op, const char *name, uint64_t given, uint64_t needed);

enum kseal_presence { KSEAL_NEEDED, KSEAL_OPTIONAL, KSEAL_UNWANTED };

struct kseal_pointer {
    const char *name;
    const void *value;
    uint32_t align; /* bytes */
    enum kseal_presence presence;
    const char *since; /* why it is needed or unwanted, as the message has it; null where that needs no words */
};

kseal_status kseal_check_pointers(const char *op, const struct kseal_pointer *pointers, size_t count);

#endif
