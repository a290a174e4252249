/* SHA-256 (FIPS 180-4) of bytes in memory. */
#ifndef KSEAL_CORE_SHA256_H
#define KSEAL_CORE_SHA256_H

#include <stddef.h>

#define KSEAL_SHA256_HEX_SIZE 65 /* 64 digits and the terminator */

/* Writes 64 lowercase hex digits and a terminator. */
void kseal_sha256_hex(const void *data, size_t size, char hex[KSEAL_SHA256_HEX_SIZE]);

#endif
