/* Context-parallel GDN prefill: from kseal_gdn_prefill_cp_args to the argument list of the variant's CuTe host function. */
#include "kernseal_ops.h"
#include "whole.h"

#define OP "gdn_prefill_cp"
#define LIMIT(name) KSEAL_GDN_PREFILL_CP_LIMIT_##name
#define BLOCK 64             /* tokens of one step of the recurrence: chunks are made of them */
#define CHUNK_LEN_UNIT 512   /* what upstream rounds the length of a chunk to where there is work for every SM */
#define CHUNK_LEN_END ((int32_t)1 << 30)
#define SEQS_END 65536       /* sequences are the second dimension of a grid */
#define HALF_BYTES 2         /* of an element of T, as of q */
#define FLOAT_BYTES 4

typedef kseal_gdn_prefill_cp_args args_t;
typedef struct kseal_gdn_prefill_cp_class class_t;

/* ---- how sequences are cut: upstream's rules (varlen_helper.py), on whole numbers only ---- */

/* Slots for the pieces of `unit` tokens of any `seqs` sequences with `tokens` together: a piece's slot follows from its start. */
static int64_t slots(int64_t seqs, int64_t tokens, int64_t unit) {
    int64_t started = at_most(seqs, tokens);
    return started + (tokens - started) / unit;
}

/* The least whole number whose square is at least `value`, for values below 2^52. */
static int64_t root_up(int64_t value) {
    int64_t below = 0; /* the greatest whose square is below it; sqrt would need libm */
    for (int64_t bit = (int64_t)1 << 26; bit > 0; bit /= 2)
        if ((below + bit) * (below + bit) < value)
            below += bit;
    return value > 0 ? below + 1 : 0;
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
    int32_t row_unit;    /* elements that strides of pool rows are a multiple of */
    int32_t tokens, heads, seqs, state_rows;
    int32_t chunk_len, t_blocks, max_t_blocks, chunks, max_chunks;
    int64_t q_stride, k_stride, v_stride, o_stride, initial_stride, final_stride;
    uint32_t map_bytes;
    struct layout at;
};

#include "gdn_prefill/common.h"

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

/* What the workspace follows from. */
static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    CHECK(kseal_check_not_negative(OP, "total_tokens", a->total_tokens));
    CHECK(check_token_rows(a, p));
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

static kseal_status check_gates(const args_t *a) {
    enum kseal_presence rows = if_any(a->total_tokens);
    const struct kseal_pointer pointers[] = {
        {"alpha", a->alpha, LIMIT(ALIGN_ALPHA), rows, NULL},
        {"beta", a->beta, LIMIT(ALIGN_BETA), rows, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
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
        .row_unit = row_unit_of(axes[KSEAL_GDN_PREFILL_CP_AXIS_STATE_DTYPE]),
        .index_size = axes[KSEAL_GDN_PREFILL_CP_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
        .heads = (int32_t)at_least(a->num_q_heads, a->num_v_heads),
    };
    CHECK(check_heads(a, true));
    CHECK(check_sizes(a, p));
    CHECK(cut(handle, a, p));
    p->seqs = (int32_t)a->num_seqs;
    lay_out(handle, p);
    return KSEAL_OK;
}

/* Checks the rest. */
static kseal_status validate(const args_t *a, struct problem *p) {
    CHECK(kseal_check_scale(OP, "scale", a->scale));
    CHECK(check_checkpoints(a, p));
    CHECK(check_checkpoint_rows(a, p));
    CHECK(check_pool_rows(a, p));
    CHECK(kseal_check_below(OP, "pool_rows", a->pool_rows, INDEX_BITS));
    CHECK(check_strides(a, p));
    CHECK(check_tokens(a));
    CHECK(check_gates(a));
    CHECK(check_states(a, p));
    CHECK(kseal_check_room(OP, "workspace_bytes", a->workspace_bytes, p->at.end));
    p->state_rows = (int32_t)(p->pooled ? a->pool_rows : a->num_seqs);
    return KSEAL_OK;
}

kseal_status kseal_gdn_prefill_cp_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = {.at.end = 0};
    CHECK(kseal_check_not_negative(OP, "num_seqs", args->num_seqs));
    if (args->num_seqs > 0)
        CHECK(size(handle, args, &p));
    *bytes = p.at.end;
    return KSEAL_OK;
}

/* ---- the argument list ---- */

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
    struct list list = {.count = 0};
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
    CHECK(kseal_check_not_negative(OP, "num_seqs", args->num_seqs));
    if (args->num_seqs == 0)
        return KSEAL_OK;
    CHECK(size(handle, args, &p));
    CHECK(validate(args, &p));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
