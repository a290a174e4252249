/* GDN decode: from kseal_gdn_decode_args to the argument list of the variant's CuTe host function. */
#include "check.h"
#include "kernseal_ops.h"
#include "list.h"
#include "whole.h"

#define OP "gdn_decode"
#define LIMIT(name) KSEAL_GDN_DECODE_LIMIT_##name
#define D LIMIT(HEAD_DIM)
#define VECTOR 8                            /* elements of a 16-byte load: strides of what is loaded so are multiples */
#define INDEX_BITS 31                       /* counts are int32 in the kernels; offsets of rows are not */
#define INDEX_END ((int64_t)1 << INDEX_BITS)
#define ADDRESS_END ((int64_t)1 << 60)      /* elements of a tensor, whose bytes must fit int64 */

typedef kseal_gdn_decode_args args_t;

/* The variant's axes and the run's strides with their defaults filled in. */
struct problem {
    const args_t *args;
    int32_t tokens, tiles;
    bool output_indices, intermediate_states;
    uint32_t index_size; /* bytes of an index, and so its alignment */
    int64_t q_stride, k_stride, v_stride, o_stride, a_stride, b_stride, row_stride;
};

kseal_status kseal_gdn_decode_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    (void)handle, (void)args;
    *bytes = 0;
    return KSEAL_OK;
}

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static kseal_status check_heads(const args_t *a) {
    CHECK(kseal_check_positive(OP, "num_q_heads", a->num_q_heads));
    if (a->num_v_heads <= 0 || a->num_v_heads % a->num_q_heads != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_v_heads is %d; it must be a positive multiple of num_q_heads, which is %d",
               a->num_v_heads, a->num_q_heads);
    if (!product_below(INDEX_END, a->num_v_heads, D * D, 1)) /* within a row of the pool offsets are int32 */
        REFUSE(KSEAL_OVERFLOW, "num_v_heads is %d; it must be below 2^17", a->num_v_heads);
    if (a->head_dim != D)
        REFUSE(KSEAL_INVALID_ARGUMENT, "head_dim is %d; it must be %d", a->head_dim, D);
    return KSEAL_OK;
}

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    CHECK(kseal_check_scale(OP, "scale", a->scale));
    if (!product_below(INDEX_END, a->batch_size, a->num_v_heads, p->tiles))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * Hv * D / tile_v must be below 2^31 (Hv is %d, D / tile_v is %d)",
               (long long)a->batch_size, a->num_v_heads, p->tiles);
    CHECK(kseal_check_positive(OP, "pool_rows", a->pool_rows));
    return kseal_check_below(OP, "pool_rows", a->pool_rows, INDEX_BITS);
}

static kseal_status check_steps(const args_t *a, const struct problem *p) {
    if (!p->intermediate_states)
        CHECK(kseal_check_zero(OP, "intermediate_steps", a->intermediate_steps, SINCE(p, intermediate_states)));
    if (p->intermediate_states && a->intermediate_steps < p->tokens)
        REFUSE(KSEAL_INVALID_ARGUMENT, "intermediate_steps is %lld; it must be at least config.tokens, which is %d",
               (long long)a->intermediate_steps, p->tokens);
    if (!product_below(INDEX_END, a->batch_size, a->intermediate_steps, a->num_v_heads))
        REFUSE(KSEAL_OVERFLOW, "intermediate_steps is %lld; B * intermediate_steps * Hv must be below 2^31 (B is %lld, Hv is %d)",
               (long long)a->intermediate_steps, (long long)a->batch_size, a->num_v_heads);
    return KSEAL_OK;
}

/* A tensor's distance between its `rows` rows, each of `dense` elements; `*stride` becomes the one to use. */
struct stride_rule {
    const char *name;
    int64_t given, dense, rows;
    int32_t unit;
    int64_t *stride;
};

static kseal_status check_stride(const struct stride_rule *r) {
    CHECK(kseal_check_stride(OP, r->name, r->given, r->dense, r->unit, r->stride));
    if (!product_below(ADDRESS_END, *r->stride, r->rows, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; times %lld rows it must be below 2^60", r->name, (long long)r->given,
               (long long)r->rows);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t rows = a->batch_size * p->tokens, hq = a->num_q_heads, hv = a->num_v_heads;
    const struct stride_rule rules[] = {
        {"q_token_stride", a->q_token_stride, hq * D, rows, VECTOR, &p->q_stride},
        {"k_token_stride", a->k_token_stride, hq * D, rows, VECTOR, &p->k_stride},
        {"v_token_stride", a->v_token_stride, hv * D, rows, VECTOR, &p->v_stride},
        {"o_token_stride", a->o_token_stride, hv * D, rows, VECTOR, &p->o_stride},
        {"a_token_stride", a->a_token_stride, hv, rows, 1, &p->a_stride},
        {"b_token_stride", a->b_token_stride, hv, rows, 1, &p->b_stride},
        {"state_row_stride", a->state_row_stride, hv * D * D, a->pool_rows, VECTOR, &p->row_stride},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        CHECK(check_stride(&rules[i]));
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum kseal_presence output = p->output_indices ? KSEAL_NEEDED : KSEAL_UNWANTED;
    enum kseal_presence intermediate = p->intermediate_states ? KSEAL_NEEDED : KSEAL_UNWANTED;
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), KSEAL_NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), KSEAL_NEEDED, NULL},
        {"a", a->a, LIMIT(ALIGN_A), KSEAL_NEEDED, NULL},
        {"b", a->b, LIMIT(ALIGN_B), KSEAL_NEEDED, NULL},
        {"a_log", a->a_log, LIMIT(ALIGN_A_LOG), KSEAL_NEEDED, NULL},
        {"dt_bias", a->dt_bias, LIMIT(ALIGN_DT_BIAS), KSEAL_NEEDED, NULL},
        {"o", a->o, LIMIT(ALIGN_O), KSEAL_NEEDED, NULL},
        {"state", a->state, LIMIT(ALIGN_STATE), KSEAL_NEEDED, NULL},
        {"state_indices", a->state_indices, p->index_size, KSEAL_NEEDED, NULL},
        {"output_state_indices", a->output_state_indices, p->index_size, output, SINCE(p, output_indices)},
        {"intermediate_states", a->intermediate_states, LIMIT(ALIGN_INTERMEDIATE_STATES), intermediate,
         SINCE(p, intermediate_states)},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Checks everything and fills in `p`. */
static kseal_status validate(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    const uint32_t *axes = handle->variant->axes;
    *p = (struct problem){
        .args = a,
        .tokens = (int32_t)axes[KSEAL_GDN_DECODE_AXIS_TOKENS],
        .tiles = D / (int32_t)axes[KSEAL_GDN_DECODE_AXIS_TILE_V],
        .output_indices = axes[KSEAL_GDN_DECODE_AXIS_OUTPUT_INDICES] != 0,
        .intermediate_states = axes[KSEAL_GDN_DECODE_AXIS_INTERMEDIATE_STATES] != 0,
        .index_size = axes[KSEAL_GDN_DECODE_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
    };
    CHECK(check_heads(a));
    CHECK(check_counts(a, p));
    CHECK(check_steps(a, p));
    CHECK(check_strides(a, p));
    return check_pointers(a, p);
}

/* ---- upstream's rule for a batch; rule.py is the same for torch ---- */

kseal_status kseal_gdn_decode_launch_choose(const args_t *a, uint32_t sm_count, kseal_gdn_decode_config *config) {
    if (config->tokens == 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "config.tokens is 0; it must be positive");
    CHECK(kseal_check_not_negative(OP, "batch_size", a->batch_size));
    CHECK(kseal_check_positive(OP, "num_v_heads", a->num_v_heads));
    if (!product_below(INDEX_END, a->batch_size, a->num_v_heads, 1))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * Hv must be below 2^31 (Hv is %d)", (long long)a->batch_size,
               a->num_v_heads);
    int64_t work = a->batch_size * a->num_v_heads, waves = 4 * (int64_t)sm_count;
    bool one = config->tokens == 1;
    config->wide = work >= (one ? 512 : 128);
    if (config->wide)
        config->tile_v = work >= 1024 ? 128 : work >= 512 ? 64 : 32;
    else if (!one || work <= 128)
        config->tile_v = 16;
    else /* the largest tile of which four waves of CTAs fill the device */
        config->tile_v = work >= waves ? 128 : 2 * work >= waves ? 64 : 32;
    return KSEAL_OK;
}

/* ---- the argument list ---- */

/* [B, T, heads] or [B, T, heads, D]. */
struct rows {
    const void *data;
    int32_t batch, heads;
    int64_t batch_stride, token_stride;
};

/* [rows, Hv, D, D]. */
struct pool {
    const void *data;
    int32_t rows, heads;
    int64_t stride;
};

static struct rows rows_of(const struct problem *p, const void *data, int32_t heads, int64_t stride) {
    return (struct rows){data, (int32_t)p->args->batch_size, heads, p->tokens * stride, stride};
}

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    int32_t hq = a.num_q_heads, hv = a.num_v_heads, batch = (int32_t)a.batch_size, steps = (int32_t)a.intermediate_steps;
    struct pool state = {a.state, (int32_t)a.pool_rows, hv, p->row_stride};
    struct vector intermediate = {a.intermediate_states, batch * steps * hv};
    struct vector a_log = {a.a_log, hv}, dt_bias = {a.dt_bias, hv};
    struct vector indices = {a.state_indices, batch}, output_indices = {a.output_state_indices, batch};
    struct rows q = rows_of(p, a.q, hq, p->q_stride), k = rows_of(p, a.k, hq, p->k_stride);
    struct rows v = rows_of(p, a.v, hv, p->v_stride), o = rows_of(p, a.o, hv, p->o_stride);
    struct rows gate = rows_of(p, a.a, hv, p->a_stride), beta = rows_of(p, a.b, hv, p->b_stride);
    struct list list = {.count = 0};
    add(&list, &state);
    add_if(&list, p->intermediate_states, &intermediate);
    add(&list, &a_log);
    add(&list, &gate);
    add(&list, &dt_bias);
    add(&list, &q);
    add(&list, &k);
    add(&list, &v);
    add(&list, &beta);
    add(&list, &o);
    add(&list, &indices);
    add_if(&list, p->output_indices, &output_indices);
    add(&list, &a.scale);
    add(&list, &hv);
    add(&list, &steps);
    add(&list, &hq);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

kseal_status kseal_gdn_decode_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(kseal_check_not_negative(OP, "batch_size", args->batch_size));
    if (args->batch_size == 0)
        return KSEAL_OK;
    CHECK(validate(handle, args, &p));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
