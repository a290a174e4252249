#define _GNU_SOURCE
#include "image.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sha256.h"

#define COMPONENT_SIZE 256 /* NAME_MAX and the terminator */

static kseal_status io_error(const char *path, const char *what) {
    int code = errno;
    char text[128] = "";
    if (code == ENOENT)
        return kseal_fail(KSEAL_MISSING, "%s: not in the bundle", path);
    if (code == ELOOP || code == ENOTDIR)
        return kseal_fail(KSEAL_MALFORMED, "%s: a symbolic link, or not below folders", path);
#if defined(__GLIBC__)
    return kseal_fail(KSEAL_IO_ERROR, "%s: %s: %s", path, what, strerror_r(code, text, sizeof text));
#else
    return kseal_fail(KSEAL_IO_ERROR, "%s: %s: error %d%s", path, what, code, text);
#endif
}

/* Opens one component after the other, since O_NOFOLLOW speaks of the last one only. */
static kseal_status open_below(int dirfd, const char *path, int *file) {
    int folder = dirfd;
    const char *rest = path;
    for (;;) {
        char component[COMPONENT_SIZE];
        const char *slash = strchr(rest, '/');
        size_t length = slash != NULL ? (size_t)(slash - rest) : strlen(rest);
        if (length == 0 || length >= sizeof component) {
            if (folder != dirfd)
                close(folder);
            return kseal_fail(KSEAL_MALFORMED, "%s: a component is empty or too long", path);
        }
        memcpy(component, rest, length);
        component[length] = '\0';
        /* O_NONBLOCK: opening a FIFO put in the file's place must not wait for a writer. */
        int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | (slash != NULL ? O_DIRECTORY : O_NONBLOCK);
        int next = openat(folder, component, flags);
        kseal_status status = next < 0 ? io_error(path, "open") : KSEAL_OK;
        if (folder != dirfd)
            close(folder);
        if (status != KSEAL_OK || slash == NULL) {
            *file = next;
            return status;
        }
        folder = next;
        rest = slash + 1;
    }
}

static kseal_status read_exactly(int file, const char *path, unsigned char *data, size_t size) {
    size_t done = 0;
    while (done < size) {
        ssize_t got = read(file, data + done, size - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return io_error(path, "read");
        if (got == 0)
            return kseal_fail(KSEAL_MISMATCH, "%s: %zu bytes, %zu were pinned", path, done, size);
        done += (size_t)got;
    }
    return KSEAL_OK;
}

static kseal_status read_open(int file, const char *path, uint64_t size, const char *sha256, void **data) {
    struct stat info;
    if (fstat(file, &info) != 0)
        return io_error(path, "fstat");
    if (!S_ISREG(info.st_mode))
        return kseal_fail(KSEAL_MALFORMED, "%s: not a regular file", path);
    if ((uint64_t)info.st_size != size)
        return kseal_fail(KSEAL_MISMATCH, "%s: %lld bytes, %llu were pinned", path, (long long)info.st_size,
                          (unsigned long long)size);
    void *bytes = malloc(size != 0 ? size : 1);
    if (bytes == NULL)
        return kseal_fail(KSEAL_OUT_OF_MEMORY, "%s: no memory for %llu bytes", path, (unsigned long long)size);
    kseal_status status = read_exactly(file, path, bytes, size);
    if (status == KSEAL_OK) {
        char hex[KSEAL_SHA256_HEX_SIZE];
        kseal_sha256_hex(bytes, size, hex);
        if (strcmp(hex, sha256) != 0)
            status = kseal_fail(KSEAL_MISMATCH, "%s: SHA-256 is %s, %s was pinned", path, hex, sha256);
    }
    if (status != KSEAL_OK) {
        free(bytes);
        return status;
    }
    *data = bytes;
    return KSEAL_OK;
}

kseal_status kseal_image_read(int dirfd, const char *path, uint64_t size, const char *sha256, void **data) {
    int file;
    kseal_status status = open_below(dirfd, path, &file);
    if (status != KSEAL_OK)
        return status;
    status = read_open(file, path, size, sha256, data);
    close(file);
    return status;
}
