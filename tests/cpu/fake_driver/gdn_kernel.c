/* GDN prefill, the SM90 class at its default axes: the recurrence on the host. Dense tensors and equal head counts only. */
#include <string.h>

#include "kernels.h"

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

uint32_t gdn_param_size(uint32_t index) {
    /* Numbers; of what is larger than a pointer, a pointer is what is read. */
    return index == 14 || index == 18 || index == 19 ? 4 : index < 20 ? 8 : 0;
}

void gdn_kernel(void **params) {
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
        memmove(state, initial + (size_t)i * D * D, D * D * sizeof *state); /* in place, it is the same memory */
        for (int64_t t = ends[i / heads]; t < ends[i / heads + 1]; t++) {
            int64_t row = t * heads + i % heads;
            struct step at = {q + row * D, k + row * D, v + row * D, o + row * D, alpha[row], beta[row], scale};
            token(state, &at);
        }
    }
}
