#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[KSEAL_MESSAGE_SIZE];

kseal_status kseal_fail(kseal_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (length >= (int)sizeof message)
        memcpy(message + sizeof message - 4, "...", 4);
    return status;
}

KSEAL_API const char *kseal_last_error(void) { return message; }

/* What a caller's struct says of itself. */
static kseal_status read_size(uint32_t *size, size_t min_size, const void *theirs, const char *name) {
    memcpy(size, theirs, sizeof *size);
    if (*size < min_size)
        return kseal_fail(KSEAL_ABI_MISMATCH, "%s.struct_size is %u; at least %zu is needed", name, *size, min_size);
    if (*size > KSEAL_STRUCT_SIZE_END)
        return kseal_fail(KSEAL_ABI_MISMATCH, "%s.struct_size is %u; up to %d are supported", name, *size,
                          KSEAL_STRUCT_SIZE_END);
    return KSEAL_OK;
}

kseal_status kseal_read_struct(void *to, size_t to_size, size_t min_size, const void *from, const char *name) {
    uint32_t from_size;
    if (from == NULL)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "%s is null", name);
    kseal_status status = read_size(&from_size, min_size, from, name);
    if (status != KSEAL_OK)
        return status;
    for (size_t i = to_size; i < from_size; i++)
        if (((const unsigned char *)from)[i] != 0)
            return kseal_fail(KSEAL_ABI_MISMATCH,
                              "%s.struct_size is %u, newer than this library, which knows %zu bytes; byte %zu is set and must be 0",
                              name, from_size, to_size, i);
    memset(to, 0, to_size);
    memcpy(to, from, from_size < to_size ? from_size : to_size);
    return KSEAL_OK;
}

kseal_status kseal_write_struct(void *to, size_t min_size, const void *from, size_t from_size, const char *name) {
    uint32_t to_size;
    kseal_status status = read_size(&to_size, min_size, to, name);
    if (status != KSEAL_OK)
        return status;
    memset(to, 0, to_size);
    memcpy(to, from, from_size < to_size ? from_size : to_size);
    memcpy(to, &to_size, sizeof to_size);
    return KSEAL_OK;
}
