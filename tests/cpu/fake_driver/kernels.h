/*
 * Stands in for GPU kernels: each reads its parameters where the kernel finds them (tensor maps, tensors, numbers) and computes
 * on the host.
 */
#ifndef FAKE_KERNELS_H
#define FAKE_KERNELS_H

#include <stdint.h>
#include <string.h>

void gdn_kernel(void **params);
void xqa_kernel(void **params);

/* Bytes of a parameter that the functions above read; 0 after the last. */
uint32_t gdn_param_size(uint32_t index);
uint32_t xqa_param_size(uint32_t index);

/* bfloat16 */
static inline float widen(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
