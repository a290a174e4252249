/* XQA decode at D = 128, group 8, pages of 16, bfloat16, one query token: attention on the host, in one pass over the keys. */
#include "kernels.h"

#include <math.h>

enum { D = 128, GROUP = 8, PAGE = 16 };

struct cache {
    const uint16_t *k, *v;
    const int32_t *page_table, *seq_lens;
    uint32_t max_pages;
};

/* In heads. */
struct strides {
    uint32_t page, token, head;
};

uint32_t xqa_param_size(uint32_t index) {
    static const uint32_t sizes[] = {4, 4, 8, 8, 8, 8, sizeof(struct cache), 4, 4, 8, 4, 4, 4, 8, 8};
    return index < sizeof sizes / sizeof *sizes ? sizes[index] : 0;
}

static float dot(const uint16_t *a, const uint16_t *b) {
    float sum = 0;
    for (int i = 0; i < D; i++)
        sum += widen(a[i]) * widen(b[i]);
    return sum;
}

static void attend(const uint16_t *q, uint16_t *o, const struct cache *cache, const struct strides *strides, float scale,
                   uint32_t sequence, uint32_t head) {
    float sum = 0, most = -INFINITY, out[D] = {0};
    for (int32_t t = 0; t < cache->seq_lens[sequence]; t++) {
        size_t page = (size_t)cache->page_table[sequence * cache->max_pages + (uint32_t)t / PAGE];
        size_t row = (page * strides->page + (uint32_t)t % PAGE * strides->token + head * strides->head) * D;
        float logit = scale * dot(q, cache->k + row), higher = fmaxf(most, logit);
        float kept = expf(most - higher), weight = expf(logit - higher);
        for (int i = 0; i < D; i++)
            out[i] = out[i] * kept + weight * widen(cache->v[row + (size_t)i]);
        sum = sum * kept + weight;
        most = higher;
    }
    for (int i = 0; i < D; i++)
        o[i] = narrow(sum > 0 ? out[i] / sum : 0);
}

void xqa_kernel(void **params) {
    uint32_t heads = *(uint32_t *)params[0], batch = *(uint32_t *)params[7];
    float scale = *(float *)params[1] / sqrtf(D);
    uint16_t *o = *(uint16_t **)params[3];
    const uint16_t *q = *(uint16_t **)params[4];
    const struct cache *cache = params[6];
    const struct strides strides = {*(uint32_t *)params[10], *(uint32_t *)params[11], *(uint32_t *)params[12]};
    for (uint32_t sequence = 0; sequence < batch; sequence++)
        for (uint32_t head = 0; head < heads * GROUP; head++) {
            size_t row = ((size_t)sequence * heads * GROUP + head) * D;
            attend(q + row, o + row, cache, &strides, scale, sequence, head / GROUP);
        }
}
