/*
 * Stands in for the GDN prefill kernel of the SM90 class at its default axes: reads its arguments where the kernel finds them
 * (tensor maps, tensors, numbers) and computes the recurrence on the host. Dense tensors and equal head counts only.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { D = 128 };

struct tensor {
    void *data;
};

/* A tensor map starts with the address of what it maps. */
static uint16_t *mapped(const void *map) {
    uintptr_t address;
    memcpy(&address, map, sizeof address);
    return (uint16_t *)address;
}

static float widen(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct step {
    const uint16_t *q, *k, *v;
    uint16_t *o;
    float alpha, beta, scale;
};

static void token(float *state, const struct step *at) {
    for (int row = 0; row < D; row++) {
        float *s = state + row * D, read = 0, out = 0;
        for (int i = 0; i < D; i++) {
            s[i] *= at->alpha;
            read += s[i] * widen(at->k[i]);
        }
        for (int i = 0; i < D; i++) {
            s[i] += at->beta * (widen(at->v[row]) - read) * widen(at->k[i]);
            out += s[i] * widen(at->q[i]);
        }
        at->o[row] = narrow(at->scale * out);
    }
}

__attribute__((visibility("default"))) void fake_kernel(const char *name, void **params) {
    if (strstr(name, "delta_rule_sm90") == NULL)
        abort();
    const float *alpha = ((struct tensor *)params[0])->data, *beta = ((struct tensor *)params[1])->data;
    const uint16_t *q = mapped(params[2]), *k = mapped(params[4]), *v = mapped(params[6]);
    uint16_t *o = mapped(params[8]);
    float *final = ((struct tensor *)params[10])->data;
    const float *initial = ((struct tensor *)params[11])->data;
    const int64_t *ends = ((struct tensor *)params[13])->data;
    float scale = *(float *)params[14];
    int heads = *(int32_t *)params[18], seqs = *(int32_t *)params[19];
    for (int i = 0; i < seqs * heads; i++) {
        float *state = final + (size_t)i * D * D;
        memcpy(state, initial + (size_t)i * D * D, D * D * sizeof *state);
        for (int64_t t = ends[i / heads]; t < ends[i / heads + 1]; t++) {
            int64_t row = t * heads + i % heads;
            struct step at = {q + row * D, k + row * D, v + row * D, o + row * D, alpha[row], beta[row], scale};
            token(state, &at);
        }
    }
}
