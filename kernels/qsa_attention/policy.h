/* Which variant FlashInfer takes for a step, and how large its tables are: arithmetic on sizes, nothing else. */
#ifndef KSEAL_QSA_POLICY_H
#define KSEAL_QSA_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define KSEAL_QSA_TILE_KV 128 /* positions */
#define KSEAL_QSA_MAX_TILE 128 /* rows of q */
#define KSEAL_QSA_KEEPS 64 /* from this tile on Q is operand A, and a step takes one KV tile of a wide head */

/* Sizes of one step. All positive; group <= 8 and group * heads_per_kv <= 128. */
struct kseal_qsa_step {
    int32_t group;        /* most query tokens of a route */
    int32_t heads_per_kv;
    int32_t head_dim;
    bool fp8;
    bool split;           /* whether several thread blocks may share a route: decode yes, prefill no */
    int32_t sm_count;
    int64_t routes;
    int64_t kv_heads;
    int64_t kv_tokens;    /* most positions that a route sees: kseal_qsa_route_tokens */
};

struct kseal_qsa_choice {
    int32_t tile_q;
    int32_t splits;
    bool persistent;
};

struct kseal_qsa_choice kseal_qsa_choose(const struct kseal_qsa_step *step);

/* What one query token selects from. */
struct kseal_qsa_selection {
    int32_t group;
    int32_t block_topk;
    int32_t block_size;
    int32_t page_size;
    int64_t max_seq_len;
    bool count_current;
    bool query_major; /* see kseal_qsa_query_major */
};

/* Tokens that are contiguous in both a block and a page. */
int32_t kseal_qsa_fragment(const struct kseal_qsa_selection *s);

/* Fragments of one route at most, columns of its row of page_indices. */
int64_t kseal_qsa_page_capacity(const struct kseal_qsa_selection *s);

/* Positions that a route sees at most. */
int64_t kseal_qsa_route_tokens(const struct kseal_qsa_selection *s);

/* Whether memberships are one mask for each query and tile of positions instead of a byte for each fragment. */
bool kseal_qsa_query_major(bool grouped, bool fp8, int32_t block_size, int32_t tile_q);

#endif
