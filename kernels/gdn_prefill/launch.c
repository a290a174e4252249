/* GDN prefill: from kseal_gdn_prefill_args to the argument list of the variant's CuTe host function. */
#include "kernseal_ops.h"

#define OP "gdn_prefill"
#define LIMIT(name) KSEAL_GDN_PREFILL_LIMIT_##name

typedef kseal_gdn_prefill_args args_t;

/* The run with its defaults filled in. Tokens are at least 1, for a tensor map must not be empty. */
struct problem {
    const args_t *args;
    bool initial_state, pooled, alpha, beta, checkpoints;
    int32_t tokens, heads, seqs, state_rows;
    int64_t q_stride, k_stride, v_stride, o_stride, initial_stride, final_stride;
    uint32_t workspace_bytes;
    uint32_t index_size; /* bytes of an element of every index array, and so its alignment */
    int32_t row_unit;    /* elements that strides of pool rows are a multiple of */
};

#include "gdn_prefill/common.h"

static const struct kseal_gdn_prefill_class *class_of(const struct kseal_handle *handle) {
    return &kseal_gdn_prefill_classes[handle->variant->class_index];
}

static uint64_t workspace_bytes(const struct kseal_handle *handle) {
    const struct kseal_gdn_prefill_class *class = class_of(handle);
    return class->workspace_bytes + (uint64_t)class->workspace_per_sm_bytes * handle->sm_count;
}

kseal_status kseal_gdn_prefill_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    (void)args; /* the same for every run */
    *bytes = workspace_bytes(handle);
    return KSEAL_OK;
}

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    CHECK(kseal_check_not_negative(OP, "total_tokens", a->total_tokens));
    CHECK(check_pool_rows(a, p));
    CHECK(check_checkpoints(a, p));
    return kseal_check_scale(OP, "scale", a->scale);
}

static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    CHECK(check_token_rows(a, p));
    if (!product_below(INDEX_END, a->num_seqs, p->heads, 1) || a->num_seqs >= INDEX_END - 1)
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; N * H must be below 2^31 (H is %d)", (long long)a->num_seqs, p->heads);
    if (!p->pooled && !product_below(INDEX_END, a->num_seqs, p->heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; N * H * D * D must be below 2^31 for packed states (H is %d, D is %d)",
               (long long)a->num_seqs, p->heads, D);
    CHECK(kseal_check_below(OP, "pool_rows", a->pool_rows, INDEX_BITS));
    return check_checkpoint_rows(a, p);
}

static kseal_status check_gates(const args_t *a, const struct problem *p) {
    enum kseal_presence rows = if_any(a->total_tokens);
    const struct kseal_pointer pointers[] = {
        {"alpha", a->alpha, LIMIT(ALIGN_ALPHA), p->alpha ? rows : KSEAL_UNWANTED, SINCE(p, alpha)},
        {"beta", a->beta, LIMIT(ALIGN_BETA), p->beta ? rows : KSEAL_UNWANTED, SINCE(p, beta)},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Checks everything and fills in `p`. */
static kseal_status validate(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    const uint32_t *axes = handle->variant->axes;
    *p = (struct problem){
        .args = a,
        .initial_state = axes[KSEAL_GDN_PREFILL_AXIS_INITIAL_STATE] != 0,
        .pooled = axes[KSEAL_GDN_PREFILL_AXIS_POOLED] != 0,
        .alpha = axes[KSEAL_GDN_PREFILL_AXIS_ALPHA] != 0,
        .beta = axes[KSEAL_GDN_PREFILL_AXIS_BETA] != 0,
        .checkpoints = axes[KSEAL_GDN_PREFILL_AXIS_CHECKPOINTS] != 0,
        .heads = (int32_t)at_least(a->num_q_heads, a->num_v_heads),
        .workspace_bytes = (uint32_t)workspace_bytes(handle),
        .row_unit = row_unit_of(axes[KSEAL_GDN_PREFILL_AXIS_STATE_DTYPE]),
        .index_size = axes[KSEAL_GDN_PREFILL_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
    };
    if (class_of(handle)->builder == KSEAL_GDN_PREFILL_BUILDER_BLACKWELL)
        p->row_unit = STRIDE_UNIT;
    CHECK(check_heads(a, class_of(handle)->gqa != 0));
    CHECK(check_counts(a, p));
    CHECK(check_sizes(a, p));
    CHECK(check_strides(a, p));
    CHECK(check_tokens(a));
    CHECK(check_gates(a, p));
    CHECK(check_states(a, p));
    CHECK(kseal_check_room(OP, "workspace_bytes", a->workspace_bytes, p->workspace_bytes));
    p->tokens = (int32_t)at_least(a->total_tokens, 1);
    p->seqs = (int32_t)a->num_seqs;
    p->state_rows = (int32_t)(p->pooled ? a->pool_rows : a->num_seqs);
    return KSEAL_OK;
}

/* ---- argument lists ---- */

/* What both lists are made of. */
struct tensors {
    struct matrix q, k, v, o, final_state, initial_state;
    struct vector cu_seqlens, state_indices, output_state_indices, checkpoint_cu_starts, workspace;
};

static struct tensors tensors_of(const struct problem *p) {
    const args_t *a = p->args;
    const void *output = a->output_state_indices != NULL ? a->output_state_indices : a->state_indices;
    return (struct tensors){
        .q = rows_of(p, a->q, a->num_q_heads, p->q_stride),
        .k = rows_of(p, a->k, a->num_k_heads, p->k_stride),
        .v = rows_of(p, a->v, a->num_v_heads, p->v_stride),
        .o = rows_of(p, a->o, p->heads, p->o_stride),
        .final_state = {a->final_state, {p->state_rows, p->heads}, p->final_stride},
        .initial_state = {a->initial_state, {p->state_rows, p->heads}, p->initial_stride},
        .cu_seqlens = {a->cu_seqlens, p->seqs + 1},
        .state_indices = {a->state_indices, p->seqs},
        .output_state_indices = {output, p->seqs},
        .checkpoint_cu_starts = {a->checkpoint_cu_starts, p->seqs + 1},
        .workspace = {a->workspace, (int32_t)p->workspace_bytes},
    };
}

/* delta_rule_sm90 and delta_rule_sm120: gates and checkpoints are flat. */
static kseal_status launch_delta_rule(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    struct tensors t = tensors_of(p);
    struct vector alpha = {or_workspace(p, a.alpha), p->tokens * p->heads};
    struct vector beta = {or_workspace(p, a.beta), p->tokens * p->heads};
    int32_t total_checkpoints = p->checkpoints ? (int32_t)a.total_checkpoints : 1;
    struct vector checkpoints = {or_workspace(p, a.checkpoints), total_checkpoints * p->heads * D * D};
    int32_t heads = p->heads, seqs = p->seqs, grid = p->seqs * p->heads;
    struct list list = {.count = 0};
    add(&list, &t.q);
    add(&list, &t.k);
    add(&list, &t.v);
    add(&list, &t.o);
    add_if(&list, p->alpha, &alpha);
    add_if(&list, p->beta, &beta);
    add(&list, &t.final_state);
    add_if(&list, p->initial_state, &t.initial_state);
    add_if(&list, p->pooled, &t.state_indices);
    add_if(&list, p->checkpoints, &checkpoints);
    add_if(&list, p->checkpoints, &t.checkpoint_cu_starts);
    add(&list, &t.workspace);
    add(&list, &t.cu_seqlens);
    add(&list, &a.scale);
    add(&list, &a.num_q_heads);
    add(&list, &a.num_k_heads);
    add(&list, &a.num_v_heads);
    add(&list, &heads);
    add(&list, &seqs);
    add(&list, &total_checkpoints);
    add(&list, &a.checkpoint_every);
    add_if(&list, p->pooled, &t.output_state_indices);
    add(&list, &grid);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

/* gated_delta_net_chunked: gates are matrices, checkpoints are rows of states, the grid is its own affair. */
static kseal_status launch_blackwell(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    struct tensors t = tensors_of(p);
    struct matrix gate = rows_of(p, a.alpha, p->heads, p->heads);
    struct matrix beta = rows_of(p, a.beta, p->heads, p->heads);
    struct matrix checkpoints = {
        or_workspace(p, a.checkpoints), {(int32_t)a.total_checkpoints, p->heads}, (int64_t)p->heads * D * D};
    struct list list = {.count = 0};
    add(&list, &t.q);
    add(&list, &t.k);
    add(&list, &t.v);
    add_if(&list, p->alpha, &gate);
    add_if(&list, p->beta, &beta);
    add(&list, &t.o);
    add(&list, &t.cu_seqlens);
    add_if(&list, p->initial_state, &t.initial_state);
    add(&list, &t.final_state);
    add_if(&list, p->pooled, &t.state_indices);
    add_if(&list, p->checkpoints, &checkpoints);
    add_if(&list, p->checkpoints, &t.checkpoint_cu_starts);
    add_if(&list, p->pooled, &t.output_state_indices);
    add(&list, &a.checkpoint_every);
    add(&list, &a.scale);
    add(&list, &t.workspace);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

kseal_status kseal_gdn_prefill_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(kseal_check_not_negative(OP, "num_seqs", args->num_seqs));
    if (args->num_seqs == 0)
        return KSEAL_OK;
    CHECK(validate(handle, args, &p));
    CHECK(kseal_handle_check_device(handle));
    if (class_of(handle)->builder == KSEAL_GDN_PREFILL_BUILDER_BLACKWELL)
        return launch_blackwell(handle, &p);
    return launch_delta_rule(handle, &p);
}
