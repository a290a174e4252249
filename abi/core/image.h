/* Bytes of one file, read once and checked. */
#ifndef KSEAL_CORE_IMAGE_H
#define KSEAL_CORE_IMAGE_H

#include "error.h"

/*
 * Reads `path` below the open folder `dirfd` into memory from malloc, and checks that it is a regular file of exactly `size`
 * bytes whose SHA-256 is `sha256` (64 lowercase hex digits). No component may be a symbolic link. What is hashed is what is
 * returned: the file is not looked at again.
 */
kseal_status kseal_image_read(int dirfd, const char *path, uint64_t size, const char *sha256, void **data);

#endif
