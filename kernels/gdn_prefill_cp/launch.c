/* Context-parallel GDN prefill: from kseal_gdn_prefill_cp_args to the argument list of the variant's CuTe host function. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_GDN_PREFILL_CP_LIMIT_##name
#define D LIMIT(HEAD_DIM)
#define BLOCK 64             /* tokens of one step of the recurrence: chunks are made of them, states exist at their ends only */
#define CHUNK_LEN_UNIT 512   /* what upstream rounds the length of a chunk to where there is work for every SM */
#define CHUNK_LEN_END ((int32_t)1 << 30)
#define SEQS_END 65536       /* sequences are the second dimension of a grid */
#define STRIDE_UNIT 128      /* elements that every stride is a multiple of; compiled into the kernels */
#define INDEX_END ((int64_t)1 << 31)        /* the kernels index with int32 */
#define TOKEN_STRIDE_END ((int64_t)1 << 39) /* a tensor map holds strides below 2^40 bytes; elements have two */
#define ADDRESS_END ((int64_t)1 << 60)      /* elements of a pool, whose bytes must fit int64 */
#define HALF_BYTES 2         /* of an element of T, as of q */
#define FLOAT_BYTES 4

typedef kseal_gdn_prefill_cp_args args_t;
typedef struct kseal_gdn_prefill_cp_class class_t;

/* ---- how sequences are cut: upstream's rules (varlen_helper.py), on whole numbers only ---- */

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t div_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
static int64_t round_up(int64_t value, int64_t unit) { return div_up(value, unit) * unit; }

/* Slots for the pieces of `unit` tokens of any `seqs` sequences with `tokens` together: a piece's slot follows from its start. */
static int64_t slots(int64_t seqs, int64_t tokens, int64_t unit) {
    int64_t started = at_most(seqs, tokens);
    return started + (tokens - started) / unit;
}

/* The least whole number whose square is at least `value`, for values below 2^52. */
static int64_t root_up(int64_t value) {
    int64_t root = (int64_t)sqrt((double)value);
    while (root * root < value)
        root++;
    while (root > 0 && (root - 1) * (root - 1) >= value)
        root--;
    return root;
}

struct cut {
    int64_t max_seqlen, tokens, seqs, heads, sms;
};

/* Chunks of one head, where one sequence has max_seqlen tokens and the others the rest. */
static int64_t chunk_bound(const struct cut *c, int64_t chunk_len) {
    return div_up(c->max_seqlen, chunk_len) + slots(at_least(c->seqs - 1, 0), c->tokens - c->max_seqlen, chunk_len);
}

/* Upstream's length of a chunk. */
static int64_t choose_chunk_len(const class_t *class, const struct cut *c) {
    int64_t ctas = div_up(c->tokens, CHUNK_LEN_UNIT) * c->heads;
    bool few = ctas * class->chunks_parallel_den < c->sms * class->chunks_parallel_num;
    if (few && c->heads <= class->chunks_balanced_heads) {
        int64_t square = div_up(c->max_seqlen * BLOCK * class->chunks_cost_fixup, class->chunks_cost_prefill);
        return at_least(BLOCK, round_up(root_up(square), BLOCK));
    }
    /* The shortest that is one wave of thread blocks. */
    int64_t wave = at_least(1, c->sms / c->heads);
    int64_t low = 1, high = at_least(1, div_up(c->max_seqlen, CHUNK_LEN_UNIT));
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (chunk_bound(c, middle * CHUNK_LEN_UNIT) <= wave)
            high = middle;
        else
            low = middle + 1;
    }
    return low * CHUNK_LEN_UNIT;
}

/* ---- the problem ---- */

/* Where the parts of the workspace begin, and its size; each is a multiple of the alignment of the whole. */
struct layout {
    uint64_t t, transfer, added, fixed, gathered, end; /* tensor maps come first */
};

/* The run with its defaults filled in. Tokens are at least 1, for a tensor map must not be empty. */
struct problem {
    const args_t *args;
    const class_t *class;
    bool initial_state, pooled, checkpoints;
    uint32_t index_size; /* bytes of an element of every index array, and so its alignment */
    int32_t tokens, heads, seqs, state_rows;
    int32_t chunk_len, t_blocks, max_t_blocks, chunks, max_chunks;
    int64_t q_stride, k_stride, v_stride, o_stride, initial_stride, final_stride;
    uint32_t map_bytes;
    struct layout at;
};

#define REFUSE(status, ...) return kseal_fail(status, "gdn_prefill_cp: " __VA_ARGS__)

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

/* Whether a * b * c, none negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b, int64_t c) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product) && product < end;
}

static kseal_status check_heads(const args_t *a) {
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
    if (!grouped_values && !grouped_queries)
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "num_q_heads, num_k_heads, num_v_heads are %d, %d, %d; Hk = Hq with Hv a multiple of Hq is supported, and Hk = Hv "
               "with Hq a multiple of Hv",
               a->num_q_heads, a->num_k_heads, a->num_v_heads);
    return KSEAL_OK;
}

/* What the workspace follows from. */
static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    if (a->total_tokens < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "total_tokens is %lld; it must not be negative", (long long)a->total_tokens);
    if (!product_below(INDEX_END, at_least(a->total_tokens, 1), p->heads, D))
        REFUSE(KSEAL_OVERFLOW, "total_tokens is %lld; T * H * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_tokens, p->heads, D);
    if (a->num_seqs >= SEQS_END)
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; it must be at most 65535", (long long)a->num_seqs);
    if (!product_below(INDEX_END, a->num_seqs, p->heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "num_seqs is %lld; N * H * D * D must be below 2^31 (H is %d, D is %d)", (long long)a->num_seqs,
               p->heads, D);
    int64_t mean = div_up(a->total_tokens, a->num_seqs);
    if (a->max_seqlen < 0 || a->max_seqlen > a->total_tokens || (a->max_seqlen != 0 && a->max_seqlen < mean))
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_seqlen is %lld; it must be %lld to %lld (the mean of the sequences to T), or 0 for T",
               (long long)a->max_seqlen, (long long)mean, (long long)a->total_tokens);
    if (a->chunk_len < 0 || a->chunk_len > CHUNK_LEN_END || a->chunk_len % BLOCK != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "chunk_len is %d; it must be a multiple of 64 up to 2^30, or 0 for upstream's choice",
               a->chunk_len);
    return KSEAL_OK;
}

static kseal_status check_checkpoints(const args_t *a, const struct problem *p) {
    if (p->checkpoints ? a->checkpoint_every <= 0 || a->checkpoint_every % BLOCK != 0 : a->checkpoint_every != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "checkpoint_every is %d; it must be %s", a->checkpoint_every,
               p->checkpoints ? "a positive multiple of 64, since config.checkpoints is 1"
                              : "0, since config.checkpoints is 0");
    if (p->checkpoints ? a->total_checkpoints < 0 : a->total_checkpoints != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "total_checkpoints is %lld; it must %s", (long long)a->total_checkpoints,
               p->checkpoints ? "not be negative" : "be 0, since config.checkpoints is 0");
    if (!product_below(INDEX_END, a->total_checkpoints, p->heads, D * D))
        REFUSE(KSEAL_OVERFLOW, "total_checkpoints is %lld; total_checkpoints * H * D * D must be below 2^31 (H is %d, D is %d)",
               (long long)a->total_checkpoints, p->heads, D);
    return KSEAL_OK;
}

static kseal_status check_pool(const args_t *a, const struct problem *p) {
    if (p->pooled ? a->pool_rows <= 0 : a->pool_rows != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "pool_rows is %lld; it must be %s", (long long)a->pool_rows,
               p->pooled ? "positive, since config.pooled is 1" : "0, since config.pooled is 0");
    if (a->pool_rows >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "pool_rows is %lld; it must be below 2^31", (long long)a->pool_rows);
    return KSEAL_OK;
}

static kseal_status check_scale(const args_t *a) {
    if (!isfinite(a->scale) || a->scale == 0.0f)
        REFUSE(KSEAL_INVALID_ARGUMENT, "scale is %g; it must be finite and not 0", (double)a->scale);
    return KSEAL_OK;
}

/* Cuts the sequences, once their sizes are known to be sound. */
static kseal_status cut(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    int64_t tokens = a->total_tokens, longest = a->max_seqlen != 0 ? a->max_seqlen : tokens;
    struct cut c = {at_least(longest, 1), at_least(tokens, 1), a->num_seqs, p->heads, handle->sm_count};
    int64_t chunk_len = a->chunk_len != 0 ? a->chunk_len : choose_chunk_len(p->class, &c);
    int64_t t_blocks = at_least(slots(c.seqs, tokens, BLOCK), 1), chunks = at_least(slots(c.seqs, tokens, chunk_len), 1);
    if (!product_below(INDEX_END, t_blocks, c.heads, BLOCK * BLOCK))
        REFUSE(KSEAL_OVERFLOW, "total_tokens, num_seqs are %lld, %lld; (min(N, T) + T / 64) * H * 4096 must be below 2^31 (H is %d)",
               (long long)tokens, (long long)a->num_seqs, p->heads);
    if (!product_below(INDEX_END, chunks, c.heads, D * D))
        REFUSE(KSEAL_OVERFLOW,
               "chunk_len is %lld, which makes up to %lld chunks; chunks * H * D * D must be below 2^31 (H is %d, D is %d)",
               (long long)chunk_len, (long long)chunks, p->heads, D);
    p->tokens = (int32_t)c.tokens;
    p->chunk_len = (int32_t)chunk_len;
    p->t_blocks = (int32_t)t_blocks;
    p->max_t_blocks = (int32_t)div_up(c.max_seqlen, BLOCK);
    p->chunks = (int32_t)chunks;
    p->max_chunks = (int32_t)div_up(c.max_seqlen, chunk_len);
    return KSEAL_OK;
}

static void lay_out(const struct kseal_handle *handle, struct problem *p) {
    uint64_t heads = (uint64_t)p->heads, matrix = heads * D * D * FLOAT_BYTES, chunks = (uint64_t)p->chunks * matrix;
    p->map_bytes = p->class->workspace_per_sm_bytes * handle->sm_count;
    p->at.t = p->map_bytes;
    p->at.transfer = p->at.t + (uint64_t)p->t_blocks * heads * BLOCK * BLOCK * HALF_BYTES;
    p->at.added = p->at.transfer + chunks;
    p->at.fixed = p->at.added + chunks;
    p->at.gathered = p->at.fixed + chunks;
    p->at.end = p->at.gathered + (p->initial_state ? (uint64_t)p->seqs * matrix : 0);
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
        {"alpha", a->alpha, LIMIT(ALIGN_ALPHA), rows, NULL},
        {"beta", a->beta, LIMIT(ALIGN_BETA), rows, NULL},
        {"initial_state", a->initial_state, LIMIT(ALIGN_INITIAL_STATE), p->initial_state ? NEEDED : UNWANTED, "initial_state"},
        {"final_state", a->final_state, LIMIT(ALIGN_FINAL_STATE), NEEDED, NULL},
        {"cu_seqlens", a->cu_seqlens, p->index_size, NEEDED, NULL},
        {"state_indices", a->state_indices, p->index_size, p->pooled ? NEEDED : UNWANTED, "pooled"},
        {"output_state_indices", a->output_state_indices, p->index_size, p->pooled ? EMPTY : UNWANTED, "pooled"},
        {"checkpoints", a->checkpoints, LIMIT(ALIGN_CHECKPOINTS), p->checkpoints ? checkpoint_rows : UNWANTED, "checkpoints"},
        {"checkpoint_cu_starts", a->checkpoint_cu_starts, p->index_size, p->checkpoints ? NEEDED : UNWANTED, "checkpoints"},
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

/* Checks what the workspace follows from, and fills in `p` but for states and strides. */
static kseal_status size(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    const uint32_t *axes = handle->variant->axes;
    *p = (struct problem){
        .args = a,
        .class = &kseal_gdn_prefill_cp_classes[handle->variant->class_index],
        .initial_state = axes[KSEAL_GDN_PREFILL_CP_AXIS_INITIAL_STATE] != 0,
        .pooled = axes[KSEAL_GDN_PREFILL_CP_AXIS_POOLED] != 0,
        .checkpoints = axes[KSEAL_GDN_PREFILL_CP_AXIS_CHECKPOINTS] != 0,
        .index_size = axes[KSEAL_GDN_PREFILL_CP_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
        .heads = a->num_q_heads > a->num_v_heads ? a->num_q_heads : a->num_v_heads,
    };
    kseal_status status = check_heads(a);
    if (status == KSEAL_OK)
        status = check_sizes(a, p);
    if (status == KSEAL_OK)
        status = cut(handle, a, p);
    p->seqs = (int32_t)a->num_seqs;
    if (status == KSEAL_OK)
        lay_out(handle, p);
    return status;
}

/* Checks the rest. */
static kseal_status validate(const args_t *a, struct problem *p) {
    kseal_status status = check_scale(a);
    if (status == KSEAL_OK)
        status = check_checkpoints(a, p);
    if (status == KSEAL_OK)
        status = check_pool(a, p);
    if (status == KSEAL_OK)
        status = check_strides(a, p);
    if (status == KSEAL_OK)
        status = check_pointers(a, p);
    if (status == KSEAL_OK)
        status = check_workspace(a, p->at.end);
    p->state_rows = (int32_t)(p->pooled ? a->pool_rows : a->num_seqs);
    return status;
}

static kseal_status check_num_seqs(const args_t *a) {
    if (a->num_seqs < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_seqs is %lld; it must not be negative", (long long)a->num_seqs);
    return KSEAL_OK;
}

kseal_status kseal_gdn_prefill_cp_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = {.at.end = 0};
    kseal_status status = check_num_seqs(args);
    if (status == KSEAL_OK && args->num_seqs > 0)
        status = size(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.at.end;
    return status;
}

/* ---- the argument list ---- */

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

#define MAX_ARGS 40

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

/* No tokens, no array: the kernels never follow the map, which still wants an address. */
static const void *or_workspace(const struct problem *p, const void *data) {
    return data != NULL ? data : p->args->workspace;
}

static struct matrix rows_of(const struct problem *p, const void *data, int32_t heads, int64_t stride) {
    return (struct matrix){or_workspace(p, data), {p->tokens, heads}, stride};
}

static const void *scratch(const struct problem *p, uint64_t offset) { return (const char *)p->args->workspace + offset; }

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    int32_t heads = p->heads, seqs = p->seqs, matrices = heads * D * D;
    int32_t chunk_len = p->chunk_len, chunks = p->chunks, max_chunks = p->max_chunks;
    int32_t t_blocks = p->t_blocks, max_t_blocks = p->max_t_blocks;
    int32_t total_checkpoints = p->checkpoints ? (int32_t)a.total_checkpoints : 1;
    const void *written = a.output_state_indices != NULL ? a.output_state_indices : a.state_indices;
    struct matrix q = rows_of(p, a.q, a.num_q_heads, p->q_stride), k = rows_of(p, a.k, a.num_k_heads, p->k_stride);
    struct matrix v = rows_of(p, a.v, a.num_v_heads, p->v_stride), o = rows_of(p, a.o, heads, p->o_stride);
    struct vector alpha = {or_workspace(p, a.alpha), p->tokens * heads}, beta = {or_workspace(p, a.beta), p->tokens * heads};
    struct matrix final_state = {a.final_state, {p->state_rows, heads}, p->final_stride};
    struct matrix initial_state = {a.initial_state, {p->state_rows, heads}, p->initial_stride};
    struct vector read_rows = {a.state_indices, seqs}, write_rows = {written, seqs};
    struct vector checkpoints = {or_workspace(p, a.checkpoints), total_checkpoints * matrices};
    struct vector checkpoint_cu_starts = {a.checkpoint_cu_starts, seqs + 1}, cu_seqlens = {a.cu_seqlens, seqs + 1};
    struct vector maps = {a.workspace, (int32_t)p->map_bytes};
    struct vector t = {scratch(p, p->at.t), t_blocks * heads * BLOCK * BLOCK};
    struct vector transfer = {scratch(p, p->at.transfer), chunks * matrices};
    struct vector added = {scratch(p, p->at.added), chunks * matrices};
    struct vector fixed = {scratch(p, p->at.fixed), chunks * matrices};
    struct vector gathered = {scratch(p, p->at.gathered), seqs * matrices};
    struct arg_list list = {.count = 0};
    add(&list, &q);
    add(&list, &k);
    add(&list, &v);
    add(&list, &o);
    add(&list, &alpha);
    add(&list, &beta);
    add(&list, &final_state);
    add_if(&list, p->initial_state, &initial_state);
    add_if(&list, p->initial_state && p->pooled, &read_rows);
    add_if(&list, p->pooled, &write_rows);
    add_if(&list, p->checkpoints, &checkpoints);
    add_if(&list, p->checkpoints, &checkpoint_cu_starts);
    add(&list, &t);
    add(&list, &transfer);
    add(&list, &added);
    add(&list, &fixed);
    add_if(&list, p->initial_state, &gathered);
    add(&list, &maps);
    add(&list, &cu_seqlens);
    add(&list, &a.scale);
    add(&list, &a.num_q_heads);
    add(&list, &a.num_k_heads);
    add(&list, &a.num_v_heads);
    add(&list, &heads);
    add(&list, &seqs);
    add(&list, &chunk_len);
    add(&list, &t_blocks);
    add(&list, &max_t_blocks);
    add(&list, &chunks);
    add(&list, &max_chunks);
    add(&list, &total_checkpoints);
    add(&list, &a.checkpoint_every);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

kseal_status kseal_gdn_prefill_cp_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    kseal_status status = check_num_seqs(args);
    if (status != KSEAL_OK || args->num_seqs == 0)
        return status;
    status = size(handle, args, &p);
    if (status == KSEAL_OK)
        status = validate(args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    return status == KSEAL_OK ? launch(handle, &p) : status;
}
