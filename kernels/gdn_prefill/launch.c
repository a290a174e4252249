/* GDN prefill: from kseal_gdn_prefill_args to the argument list of the variant's CuTe host function. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_GDN_PREFILL_LIMIT_##name
#define D LIMIT(HEAD_DIM)
#define STRIDE_UNIT 128      /* elements that every stride is a multiple of; compiled into the kernels */
#define CHECKPOINT_UNIT 64   /* tokens of one chunk: states exist at its ends only */
#define INDEX_END ((int64_t)1 << 31)        /* the kernels index with int32 */
#define TOKEN_STRIDE_END ((int64_t)1 << 39) /* a tensor map holds strides below 2^40 bytes; elements have two */
#define ADDRESS_END ((int64_t)1 << 60)      /* elements of a pool, whose bytes must fit int64 */

typedef kseal_gdn_prefill_args args_t;

/* The run with its defaults filled in. Tokens are at least 1, for a tensor map must not be empty. */
struct problem {
    const args_t *args;
    bool initial_state, pooled, alpha, beta, checkpoints;
    int32_t tokens, heads, seqs, state_rows;
    int64_t q_stride, k_stride, v_stride, o_stride, initial_stride, final_stride;
    uint32_t workspace_bytes;
    uint32_t index_size; /* bytes of an element of every index array, and so its alignment */
};

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

#define REFUSE(status, ...) return kseal_fail(status, "gdn_prefill: " __VA_ARGS__)

/* Whether a * b * c, none negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b, int64_t c) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product) && product < end;
}

static kseal_status check_heads(const args_t *a, bool gqa) {
    if (a->num_q_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be positive", a->num_q_heads);
    if (a->num_k_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_k_heads is %d; it must be positive", a->num_k_heads);
    if (a->num_v_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_v_heads is %d; it must be positive", a->num_v_heads);
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

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    if (a->total_tokens < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "total_tokens is %lld; it must not be negative", (long long)a->total_tokens);
    if (p->pooled ? a->pool_rows <= 0 : a->pool_rows != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "pool_rows is %lld; it must be %s", (long long)a->pool_rows,
               p->pooled ? "positive, since config.pooled is 1" : "0, since config.pooled is 0");
    if (p->checkpoints ? a->checkpoint_every <= 0 || a->checkpoint_every % CHECKPOINT_UNIT != 0 : a->checkpoint_every != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "checkpoint_every is %d; it must be %s", a->checkpoint_every,
               p->checkpoints ? "a positive multiple of 64, since config.checkpoints is 1"
                              : "0, since config.checkpoints is 0");
    if (p->checkpoints ? a->total_checkpoints < 0 : a->total_checkpoints != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "total_checkpoints is %lld; it must %s", (long long)a->total_checkpoints,
               p->checkpoints ? "not be negative" : "be 0, since config.checkpoints is 0");
    if (!isfinite(a->scale) || a->scale == 0.0f)
        REFUSE(KSEAL_INVALID_ARGUMENT, "scale is %g; it must be finite and not 0", (double)a->scale);
    return KSEAL_OK;
}

static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    int64_t heads = p->heads, tokens = a->total_tokens > 0 ? a->total_tokens : 1;
    if (!product_below(INDEX_END, tokens, heads, D))
        REFUSE(KSEAL_OVERFLOW, "total_tokens is %lld; T * H * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_tokens, p->heads, D);
    if (!product_below(INDEX_END, a->num_seqs, heads, 1) || a->num_seqs >= INDEX_END - 1)
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; N * H must be below 2^31 (H is %d)", (long long)a->num_seqs, p->heads);
    if (!p->pooled && !product_below(INDEX_END, a->num_seqs, heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; N * H * D * D must be below 2^31 for packed states (H is %d, D is %d)",
               (long long)a->num_seqs, p->heads, D);
    if (a->pool_rows >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "pool_rows is %lld; it must be below 2^31", (long long)a->pool_rows);
    if (!product_below(INDEX_END, a->total_checkpoints, heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "total_checkpoints is %lld; total_checkpoints * H * D * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_checkpoints, p->heads, D);
    return KSEAL_OK;
}

/* Writes the stride to use: `given`, or `dense` where that is 0. */
static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t end, int64_t *stride) {
    *stride = given != 0 ? given : dense;
    if (*stride < dense)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %lld, or 0 for that", name, (long long)given,
               (long long)dense);
    if (*stride % STRIDE_UNIT != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %d", name, (long long)given, STRIDE_UNIT);
    if (*stride >= end)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below %lld", name, (long long)given, (long long)end);
    return KSEAL_OK;
}

static kseal_status check_row_stride(const char *name, int64_t given, const struct problem *p, int64_t *stride) {
    if (!p->pooled && given != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be 0, since config.pooled is 0", name, (long long)given);
    int64_t end = ADDRESS_END / (p->pooled ? p->args->pool_rows : 1);
    return check_stride(name, given, (int64_t)p->heads * D * D, end, stride);
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t end = TOKEN_STRIDE_END;
    kseal_status status = check_stride("q_token_stride", a->q_token_stride, (int64_t)a->num_q_heads * D, end, &p->q_stride);
    if (status == KSEAL_OK)
        status = check_stride("k_token_stride", a->k_token_stride, (int64_t)a->num_k_heads * D, end, &p->k_stride);
    if (status == KSEAL_OK)
        status = check_stride("v_token_stride", a->v_token_stride, (int64_t)a->num_v_heads * D, end, &p->v_stride);
    if (status == KSEAL_OK)
        status = check_stride("o_token_stride", a->o_token_stride, (int64_t)p->heads * D, end, &p->o_stride);
    if (status == KSEAL_OK)
        status = check_row_stride("initial_state_stride", a->initial_state_stride, p, &p->initial_stride);
    if (status == KSEAL_OK)
        status = check_row_stride("final_state_stride", a->final_state_stride, p, &p->final_stride);
    return status;
}

/* NEEDED and UNWANTED go with an axis of the config, named for the message; EMPTY arrays may be null. */
enum presence { NEEDED, UNWANTED, EMPTY };

struct pointer {
    const char *name;
    const void *value;
    uint32_t align;
    enum presence presence;
    const char *because;
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->presence == NEEDED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed%s%s%s", p->name, p->because ? ", since config." : "",
               p->because ? p->because : "", p->because ? " is 1" : "");
    if (p->value != NULL && p->presence == UNWANTED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since config.%s is 0", p->name, p->value, p->because);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %u bytes", p->name, p->value, p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum presence rows = a->total_tokens > 0 ? NEEDED : EMPTY;
    enum presence checkpoint_rows = a->total_checkpoints > 0 ? NEEDED : EMPTY;
    const struct pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), rows, NULL},
        {"k", a->k, LIMIT(ALIGN_K), rows, NULL},
        {"v", a->v, LIMIT(ALIGN_V), rows, NULL},
        {"o", a->o, LIMIT(ALIGN_O), rows, NULL},
        {"alpha", a->alpha, LIMIT(ALIGN_ALPHA), p->alpha ? rows : UNWANTED, "alpha"},
        {"beta", a->beta, LIMIT(ALIGN_BETA), p->beta ? rows : UNWANTED, "beta"},
        {"initial_state", a->initial_state, LIMIT(ALIGN_INITIAL_STATE), p->initial_state ? NEEDED : UNWANTED, "initial_state"},
        {"final_state", a->final_state, LIMIT(ALIGN_FINAL_STATE), NEEDED, NULL},
        {"cu_seqlens", a->cu_seqlens, p->index_size, NEEDED, NULL},
        {"state_indices", a->state_indices, p->index_size, p->pooled ? NEEDED : UNWANTED, "pooled"},
        {"output_state_indices", a->output_state_indices, p->index_size, p->pooled ? EMPTY : UNWANTED,
         "pooled"},
        {"checkpoints", a->checkpoints, LIMIT(ALIGN_CHECKPOINTS), p->checkpoints ? checkpoint_rows : UNWANTED, "checkpoints"},
        {"checkpoint_cu_starts", a->checkpoint_cu_starts, p->index_size,
         p->checkpoints ? NEEDED : UNWANTED, "checkpoints"},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), NEEDED, NULL},
    };
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        kseal_status status = check_pointer(&pointers[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

static kseal_status check_workspace(const args_t *a, uint64_t needed) {
    if (a->workspace_bytes < needed)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; %llu are needed", (unsigned long long)a->workspace_bytes,
               (unsigned long long)needed);
    return KSEAL_OK;
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
        .heads = a->num_q_heads > a->num_v_heads ? a->num_q_heads : a->num_v_heads,
        .workspace_bytes = (uint32_t)workspace_bytes(handle),
        .index_size = axes[KSEAL_GDN_PREFILL_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
    };
    kseal_status status = check_heads(a, class_of(handle)->gqa != 0);
    if (status == KSEAL_OK)
        status = check_counts(a, p);
    if (status == KSEAL_OK)
        status = check_sizes(a, p);
    if (status == KSEAL_OK)
        status = check_strides(a, p);
    if (status == KSEAL_OK)
        status = check_pointers(a, p);
    if (status == KSEAL_OK)
        status = check_workspace(a, p->workspace_bytes);
    p->tokens = a->total_tokens > 0 ? (int32_t)a->total_tokens : 1;
    p->seqs = (int32_t)a->num_seqs;
    p->state_rows = (int32_t)(p->pooled ? a->pool_rows : a->num_seqs);
    return status;
}

/* ---- argument lists ---- */

/* Tensors as CuTe passes them: the base, then the extents and strides that are not compiled in. */
struct vector {
    const void *data;
    int32_t size;
};
struct matrix {
    const void *data;
    int32_t shape[2];
    int64_t stride;
};

#define MAX_ARGS 32

struct arg_list {
    void *args[MAX_ARGS];
    int32_t count;
};

static void add(struct arg_list *list, void *arg) { list->args[list->count++] = arg; }

/* An argument that this variant was compiled without is not in its list at all. */
static void add_if(struct arg_list *list, bool present, void *arg) {
    if (present)
        add(list, arg);
}

/* What both lists are made of. */
struct tensors {
    struct matrix q, k, v, o, final_state, initial_state;
    struct vector cu_seqlens, state_indices, output_state_indices, checkpoint_cu_starts, workspace;
};

static struct matrix rows_of(const struct problem *p, const void *data, int32_t heads, int64_t stride) {
    /* No tokens, no array: the kernel copies states and never follows the map, which still wants an address. */
    return (struct matrix){data != NULL ? data : p->args->workspace, {p->tokens, heads}, stride};
}

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

static const void *or_workspace(const struct problem *p, const void *data) {
    return data != NULL ? data : p->args->workspace;
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
    struct arg_list list = {.count = 0};
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
    struct arg_list list = {.count = 0};
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
    if (args->num_seqs < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_seqs is %lld; it must not be negative", (long long)args->num_seqs);
    if (args->num_seqs == 0)
        return KSEAL_OK;
    kseal_status status = validate(handle, args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    if (status != KSEAL_OK)
        return status;
    if (class_of(handle)->builder == KSEAL_GDN_PREFILL_BUILDER_BLACKWELL)
        return launch_blackwell(handle, &p);
    return launch_delta_rule(handle, &p);
}
