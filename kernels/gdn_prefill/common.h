/*
 * What GDN prefill and its context-parallel form have in common, for launch code with an OP, a LIMIT, an args_t, and a struct
 * problem, whose fields have the same names in both.
 */
#ifndef KSEAL_GDN_PREFILL_COMMON_H
#define KSEAL_GDN_PREFILL_COMMON_H

#include "check.h"
#include "list.h"
#include "whole.h"

#define D LIMIT(HEAD_DIM)
#define CHECKPOINT_UNIT 64   /* tokens of one step of the recurrence: states exist at its ends only */
#define STRIDE_UNIT 128      /* elements that strides of tokens are a multiple of; compiled into the kernels */
#define ROW_UNIT_BYTES 16    /* that strides of pool rows are a multiple of, likewise */
#define INDEX_BITS 31        /* the kernels index with int32 */
#define INDEX_END ((int64_t)1 << INDEX_BITS)
#define TOKEN_STRIDE_END ((int64_t)1 << 39) /* a tensor map holds strides below 2^40 bytes; elements have two */
#define ADDRESS_END ((int64_t)1 << 60)      /* elements of a pool, whose bytes must fit int64 */

static inline kseal_status check_heads(const args_t *a, bool gqa) {
    CHECK(kseal_check_positive(OP, "num_q_heads", a->num_q_heads));
    CHECK(kseal_check_positive(OP, "num_k_heads", a->num_k_heads));
    CHECK(kseal_check_positive(OP, "num_v_heads", a->num_v_heads));
    if (a->head_dim != D)
        REFUSE(KSEAL_INVALID_ARGUMENT, "head_dim is %d; it must be %d", a->head_dim, D);
    bool grouped_values = a->num_k_heads == a->num_q_heads && a->num_v_heads % a->num_q_heads == 0;
    bool grouped_queries = a->num_k_heads == a->num_v_heads && a->num_q_heads % a->num_v_heads == 0;
    if (!grouped_values && !(gqa && grouped_queries))
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "num_q_heads, num_k_heads, num_v_heads are %d, %d, %d; Hk = Hq with Hv a multiple of Hq is supported%s",
               a->num_q_heads, a->num_k_heads, a->num_v_heads, gqa ? ", and Hk = Hv with Hq a multiple of Hv" : "");
    return KSEAL_OK;
}

static inline kseal_status check_token_rows(const args_t *a, const struct problem *p) {
    if (!product_below(INDEX_END, at_least(a->total_tokens, 1), p->heads, D))
        REFUSE(KSEAL_OVERFLOW, "total_tokens is %lld; T * H * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_tokens, p->heads, D);
    return KSEAL_OK;
}

static inline kseal_status check_pool_rows(const args_t *a, const struct problem *p) {
    if (p->pooled ? a->pool_rows <= 0 : a->pool_rows != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "pool_rows is %lld; it must be %s", (long long)a->pool_rows,
               p->pooled ? "positive, since config.pooled is 1" : "0, since config.pooled is 0");
    return KSEAL_OK;
}

static inline kseal_status check_checkpoints(const args_t *a, const struct problem *p) {
    if (!p->checkpoints) {
        CHECK(kseal_check_zero(OP, "checkpoint_every", a->checkpoint_every, SINCE(p, checkpoints)));
        return kseal_check_zero(OP, "total_checkpoints", a->total_checkpoints, SINCE(p, checkpoints));
    }
    if (a->checkpoint_every <= 0 || a->checkpoint_every % CHECKPOINT_UNIT != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "checkpoint_every is %d; it must be a positive multiple of 64, since config.checkpoints is 1",
               a->checkpoint_every);
    return kseal_check_not_negative(OP, "total_checkpoints", a->total_checkpoints);
}

static inline kseal_status check_checkpoint_rows(const args_t *a, const struct problem *p) {
    if (!product_below(INDEX_END, a->total_checkpoints, p->heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "total_checkpoints is %lld; total_checkpoints * H * D * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_checkpoints, p->heads, D);
    return KSEAL_OK;
}

/* Elements of a state in ROW_UNIT_BYTES. */
static inline int32_t row_unit_of(uint32_t state_dtype) {
    return ROW_UNIT_BYTES / (state_dtype == KSEAL_DTYPE_F32 ? (int32_t)sizeof(float) : (int32_t)sizeof(uint16_t));
}

static inline kseal_status check_stride(const char *name, int64_t given, int64_t dense, int32_t unit, int64_t end, int64_t *stride) {
    CHECK(kseal_check_stride(OP, name, given, dense, unit, stride));
    if (*stride >= end)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below %lld", name, (long long)given, (long long)end);
    return KSEAL_OK;
}

static inline kseal_status check_row_stride(const char *name, int64_t given, const struct problem *p, int64_t *stride) {
    if (!p->pooled)
        CHECK(kseal_check_zero(OP, name, given, SINCE(p, pooled)));
    int64_t end = ADDRESS_END / (p->pooled ? p->args->pool_rows : 1);
    return check_stride(name, given, (int64_t)p->heads * D * D, p->row_unit, end, stride);
}

static inline kseal_status check_token_stride(const char *name, int64_t given, int32_t heads, int64_t *stride) {
    return check_stride(name, given, (int64_t)heads * D, STRIDE_UNIT, TOKEN_STRIDE_END, stride);
}

static inline kseal_status check_strides(const args_t *a, struct problem *p) {
    CHECK(check_token_stride("q_token_stride", a->q_token_stride, a->num_q_heads, &p->q_stride));
    CHECK(check_token_stride("k_token_stride", a->k_token_stride, a->num_k_heads, &p->k_stride));
    CHECK(check_token_stride("v_token_stride", a->v_token_stride, a->num_v_heads, &p->v_stride));
    CHECK(check_token_stride("o_token_stride", a->o_token_stride, p->heads, &p->o_stride));
    CHECK(check_row_stride("initial_state_stride", a->initial_state_stride, p, &p->initial_stride));
    return check_row_stride("final_state_stride", a->final_state_stride, p, &p->final_stride);
}

/* Of arrays with a row for each of `count`: there may be none of either. */
static inline enum kseal_presence if_any(int64_t count) { return count > 0 ? KSEAL_NEEDED : KSEAL_OPTIONAL; }

static inline kseal_status check_tokens(const args_t *a) {
    enum kseal_presence rows = if_any(a->total_tokens);
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), rows, NULL},
        {"k", a->k, LIMIT(ALIGN_K), rows, NULL},
        {"v", a->v, LIMIT(ALIGN_V), rows, NULL},
        {"o", a->o, LIMIT(ALIGN_O), rows, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

static inline kseal_status check_states(const args_t *a, const struct problem *p) {
    enum kseal_presence initial = p->initial_state ? KSEAL_NEEDED : KSEAL_UNWANTED;
    enum kseal_presence rows = p->pooled ? KSEAL_NEEDED : KSEAL_UNWANTED;
    enum kseal_presence other_rows = p->pooled ? KSEAL_OPTIONAL : KSEAL_UNWANTED;
    enum kseal_presence checkpoints = p->checkpoints ? if_any(a->total_checkpoints) : KSEAL_UNWANTED;
    enum kseal_presence starts = p->checkpoints ? KSEAL_NEEDED : KSEAL_UNWANTED;
    const struct kseal_pointer pointers[] = {
        {"initial_state", a->initial_state, LIMIT(ALIGN_INITIAL_STATE), initial, SINCE(p, initial_state)},
        {"final_state", a->final_state, LIMIT(ALIGN_FINAL_STATE), KSEAL_NEEDED, NULL},
        {"cu_seqlens", a->cu_seqlens, p->index_size, KSEAL_NEEDED, NULL},
        {"state_indices", a->state_indices, p->index_size, rows, SINCE(p, pooled)},
        {"output_state_indices", a->output_state_indices, p->index_size, other_rows, SINCE(p, pooled)},
        {"checkpoints", a->checkpoints, LIMIT(ALIGN_CHECKPOINTS), checkpoints, SINCE(p, checkpoints)},
        {"checkpoint_cu_starts", a->checkpoint_cu_starts, p->index_size, starts, SINCE(p, checkpoints)},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), KSEAL_NEEDED, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* No tokens, no array: the kernels never follow the map, which still wants an address. */
static inline const void *or_workspace(const struct problem *p, const void *data) {
    return data != NULL ? data : p->args->workspace;
}

static inline struct matrix rows_of(const struct problem *p, const void *data, int32_t heads, int64_t stride) {
    return (struct matrix){or_workspace(p, data), {p->tokens, heads}, stride};
}

#endif
