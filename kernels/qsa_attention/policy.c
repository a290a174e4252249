/*
 * FlashInfer's policy, as its Python has it (attention/prims_ts/_q_token_kv_block_sparse_policy.py): a query tile that the
 * group fits, then as many splits as one wave of thread blocks has room and every block has work for.
 */
#include "qsa_attention/policy.h"

#include <stddef.h>

#include "whole.h"

#define MAX_SPLITS 128
#define FULL_SPLIT_STEPS 2  /* steps through KV that a split of a grouped route has at least */
#define MASK_FRAGMENTS 32   /* fragments that one mask of a query has a bit for */

static const int32_t tiles[] = {8, 16, 32, 64, 128};
#define TILES (sizeof tiles / sizeof *tiles)

static bool wide_fp8(const struct kseal_qsa_step *s) { return s->fp8 && (s->head_dim == 192 || s->head_dim == 256); }

/* KV tiles that a thread block works on in one step. */
static int32_t kv_tiles_of(const struct kseal_qsa_step *s, int32_t tile_q) {
    return s->head_dim > 128 && tile_q >= KSEAL_QSA_KEEPS ? 1 : 2;
}

/* The smallest tile of at least `least` rows that the group fits. */
static int32_t tile_for(const struct kseal_qsa_step *s, int32_t least) {
    for (size_t i = 0; i < TILES; i++)
        if (tiles[i] >= least && tiles[i] / s->heads_per_kv >= s->group)
            return tiles[i];
    return tiles[TILES - 1];
}

static int32_t splits_for(const struct kseal_qsa_step *s, int32_t tile_q) {
    if (!s->split)
        return 1;
    int64_t kv_tiles = kv_tiles_of(s, tile_q), most = MAX_SPLITS, steps = FULL_SPLIT_STEPS;
    if (s->group == 1) {
        /* FP8 gives each split two KV tiles in either layout: with one, merging costs more than the split saves. */
        int64_t least = s->fp8 ? at_least(2, kv_tiles) : kv_tiles;
        steps = least / kv_tiles;
        most = at_most(most, at_least(1, s->kv_tokens / (KSEAL_QSA_TILE_KV * least)));
    }
    most = at_most(most, at_least(1, div_up(s->kv_tokens, KSEAL_QSA_TILE_KV * kv_tiles * steps)));
    return (int32_t)at_most(most, at_least(1, s->sm_count / (s->routes * s->kv_heads)));
}

struct kseal_qsa_choice kseal_qsa_choose(const struct kseal_qsa_step *s) {
    struct kseal_qsa_choice choice = {.tile_q = tile_for(s, wide_fp8(s) && s->group == 1 ? KSEAL_QSA_KEEPS : tiles[0])};
    choice.splits = splits_for(s, choice.tile_q);
    if (wide_fp8(s) && choice.splits == 1 && choice.tile_q < KSEAL_QSA_KEEPS) {
        choice.tile_q = tile_for(s, KSEAL_QSA_KEEPS);
        choice.splits = splits_for(s, choice.tile_q);
    }
    /* Without splits every count of routes takes the persistent grid, so that prefill needs one variant a group. */
    choice.persistent = choice.splits == 1 && (!s->split || s->routes * s->kv_heads > s->sm_count);
    return choice;
}

int32_t kseal_qsa_fragment(const struct kseal_qsa_selection *s) {
    int32_t a = s->block_size, b = s->page_size;
    while (b != 0) {
        int32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static int64_t block_capacity(const struct kseal_qsa_selection *s) {
    return at_most((int64_t)s->group * (s->block_topk + 1), div_up(s->max_seq_len, s->block_size));
}

int64_t kseal_qsa_page_capacity(const struct kseal_qsa_selection *s) {
    int64_t capacity = block_capacity(s) * (s->block_size / kseal_qsa_fragment(s));
    return s->query_major ? round_up(capacity, MASK_FRAGMENTS) : capacity;
}

int64_t kseal_qsa_route_tokens(const struct kseal_qsa_selection *s) {
    int64_t tail = s->block_size - (s->count_current ? 1 : 0);
    int64_t tokens = s->group == 1 ? (int64_t)s->block_topk * s->block_size + tail : block_capacity(s) * s->block_size;
    return at_most(tokens, s->max_seq_len);
}

bool kseal_qsa_query_major(bool grouped, bool fp8, int32_t block_size, int32_t tile_q) {
    return grouped && fp8 && block_size == 4 && tile_q >= KSEAL_QSA_KEEPS;
}
