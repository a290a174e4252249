/* A status with a message that this thread can ask for, and reading of caller structs. */
#ifndef KSEAL_CORE_ERROR_H
#define KSEAL_CORE_ERROR_H

#include <stddef.h>

#include "abi.h"

/* Longest message with its terminator; a longer one is cut and ends in "...". */
#define KSEAL_MESSAGE_SIZE 4096

/* Records the message for this thread and returns `status`. Allocates nothing on the heap. */
kseal_status kseal_fail(kseal_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* No struct of any release is larger: what claims to be has no struct_size. */
#define KSEAL_STRUCT_SIZE_END 4096

/* Copies a caller's struct of any release into ours: fields that it lacks become zero, fields that we lack must be zero. */
kseal_status kseal_read_struct(void *to, size_t to_size, size_t min_size, const void *from, const char *name);

/* Copies ours into a caller's of any release and size: what it lacks is left out, what we lack becomes zero. */
kseal_status kseal_write_struct(void *to, size_t min_size, const void *from, size_t from_size, const char *name);

#endif
