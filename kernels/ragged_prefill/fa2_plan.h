/*
 * Plans of upstream's FA2 prefill, and what runs of both its ops share, that over packed keys and that over keys in pages. For
 * launch code that has defined OP, LIMIT and args_t, and:
 *
 *   struct strides   distances between keys and between values, as its kernel has them
 *   KEYS             the arrays of the plan that say where keys are
 *   MAGIC            what a plan of its begins with
 *   KV_TOTAL         the field of its args that bounds them
 *   V_DIM            the word for elements of a row of v, in messages
 *   TILE_128_DIM     up to how many of them a tile of 128 rows is there
 *
 * Lengths here are in pages: keys that are packed are pages of one key.
 */
#ifndef KSEAL_RAGGED_PREFILL_FA2_PLAN_H
#define KSEAL_RAGGED_PREFILL_FA2_PLAN_H

#include <string.h>

#include "check.h"
#include "kernseal_ops.h"
#include "whole.h"

#define COUNT_END ((int64_t)1 << 31)  /* indices in the plan are int32 */
#define OFFSET_END ((int64_t)1 << 32) /* the kernels multiply rows and strides as uint32, */
#define STRIDE_BITS 28                /* and 16 rows at a time */
#define ELEM_BYTES 2
#define WARP 32
#define WARPS 4
#define BLOCKS_PER_SM 2    /* that a split aims at */
#define SHORTEST_CHUNK 128 /* keys, where the split is upstream's choice */
#define MERGE_THREADS 128
#define MERGE_VEC 8 /* elements of a thread */
#define MERGE_BLOCKS_PER_SM 8

enum { UNSPLIT = 0, CHOSEN = -1 }; /* kv_chunk */
enum { SMALL, MIDDLE, LARGE, TILES };
static const uint32_t tile_rows[TILES] = {16, 64, 128};

/* What a plan consists of, in this order. */
enum {
    Q_INDPTR,
    KEYS,
    REQUESTS, /* from here on as in upstream's workspace, padding included */
    Q_TILES,
    KV_TILES,
    O_INDPTR,
    CHUNK,
    ROWS,
    MERGE_INDPTR,
    VALID,
    ARRAYS
};

/* What a run reads of the plan on the host. Offsets are in bytes from its beginning. */
struct head {
    uint64_t magic;
    int64_t batch_size, total_q, KV_TOTAL, kv_chunk;
    int64_t head_dim, v_dim; /* of the variant: what the workspace holds follows from them */
    int32_t num_q_heads, num_kv_heads;
    uint32_t fixed_grid, tile;
    uint32_t grid, rows;
    uint32_t split, page_size; /* page_size is 0 where there are no pages */
    uint64_t at[ARRAYS];
    uint64_t bytes;
    uint64_t part_lse_at, workspace_bytes;
};

/* cuda::fast_mod_div with the divisor beside it (fastdiv.cuh). */
struct divisor {
    uint32_t divisor, multiplier, add;
    int32_t shift;
    uint32_t value;
};

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    int64_t head_dim, v_dim, group_size;
    int64_t page_size;         /* 0 where there are no pages */
    int64_t total_pages;       /* that all sequences can have keys in */
    int64_t splittable_blocks; /* thread blocks over the tiles of one KV head that a split may make */
    bool fixed_grid;
    uint32_t q_row, q_head;
    struct strides kv;
};

/* ---- what the op says ---- */

/* The run before anything is checked. */
static struct problem problem_of(const struct kseal_handle *handle, const args_t *a);

/* Checks everything but memory. *empty: nothing is asked for, so no more was looked at. */
static kseal_status check_sizes(const args_t *a, struct problem *p, bool *empty);

/* Checks what a plan reads, and where it goes. */
static kseal_status check_planned(const args_t *a);

/* Pages that sequence i has keys in. */
static int64_t pages_of(const struct problem *p, int64_t i);

/* The values of one of the KEYS, and how many it has, which is known before there are values. */
static const int32_t *keys_of(const struct problem *p, int array, int64_t *count);

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static inline uint64_t align_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

static inline int64_t splittable_blocks(const struct kseal_handle *handle) { return BLOCKS_PER_SM * (int64_t)handle->sm_count; }

static inline int64_t keys_of_page(const struct problem *p) { return at_least(p->page_size, 1); }

static inline uint32_t tiles_of(const struct problem *p) { return p->v_dim <= TILE_128_DIM ? TILES : LARGE; }

static inline kseal_status check_count(const char *name, int64_t value) {
    CHECK(kseal_check_not_negative(OP, name, value));
    if (value >= COUNT_END - 1)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below 2^31 - 1", name, (long long)value);
    return KSEAL_OK;
}

static inline kseal_status check_heads(const args_t *a, struct problem *p) {
    if (a->num_kv_heads <= 0 || a->num_kv_heads > LIMIT(MAX_KV_HEADS))
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_kv_heads is %d; 1 to %d are supported", a->num_kv_heads, LIMIT(MAX_KV_HEADS));
    if (a->num_q_heads <= 0 || a->num_q_heads % a->num_kv_heads != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be a positive multiple of num_kv_heads, %d", a->num_q_heads,
               a->num_kv_heads);
    p->group_size = a->num_q_heads / a->num_kv_heads;
    p->splittable_blocks /= a->num_kv_heads;
    if (!product_below(COUNT_END - tile_rows[LARGE], a->total_q, p->group_size, 1))
        REFUSE(KSEAL_OVERFLOW, "total_q is %lld; total_q * num_q_heads / num_kv_heads must be below 2^31 - %u",
               (long long)a->total_q, tile_rows[LARGE]);
    return KSEAL_OK;
}

static inline kseal_status check_choices(const args_t *a, struct problem *p) {
    bool known = a->tile_q == 0;
    for (uint32_t tile = 0; tile < tiles_of(p); tile++)
        known = known || a->tile_q == tile_rows[tile];
    if (!known)
        REFUSE(KSEAL_UNSUPPORTED, "tile_q is %u; 0, 16%s are supported with a " V_DIM " of %lld", a->tile_q,
               tiles_of(p) == TILES ? ", 64, 128" : ", 64", (long long)p->v_dim);
    CHECK(kseal_check_flag(OP, "fixed_grid", a->fixed_grid));
    CHECK(kseal_check_flag(OP, "pdl", a->pdl));
    if (a->kv_chunk < CHOSEN || a->kv_chunk >= COUNT_END)
        REFUSE(KSEAL_INVALID_ARGUMENT, "kv_chunk is %lld; -1, 0 and lengths below 2^31 are supported", (long long)a->kv_chunk);
    if (a->fixed_grid != 0 && a->kv_chunk > 0)
        REFUSE(KSEAL_UNSUPPORTED, "kv_chunk is %lld; with fixed_grid 1, 0 and -1 are supported", (long long)a->kv_chunk);
    p->fixed_grid = a->fixed_grid != 0;
    return KSEAL_OK;
}

/* Writes the stride to use: `given`, or `dense` where that is 0. It is below 2^bits. */
static inline kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t head, int bits,
                                        uint32_t *stride) {
    int64_t used = given != 0 ? given : dense;
    if (used < head)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %lld, or 0 for %lld", name, (long long)given,
               (long long)head, (long long)dense);
    if (used % (LIMIT(STRIDE_ALIGN) / ELEM_BYTES) != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %d elements, %d bytes", name, (long long)given,
               LIMIT(STRIDE_ALIGN) / ELEM_BYTES, LIMIT(STRIDE_ALIGN));
    if (used >> bits != 0)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below 2^%d", name, (long long)used, bits);
    *stride = (uint32_t)used;
    return KSEAL_OK;
}

static inline kseal_status check_reach(const char *name, int64_t count, int64_t stride, const char *of) {
    if (!product_below(OFFSET_END, count, stride, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; times %s, %lld, it must be below 2^32", name, (long long)count, of,
               (long long)stride);
    return KSEAL_OK;
}

static inline kseal_status check_pointer(const char *name, const void *pointer, uintptr_t align, bool needed) {
    if (pointer == NULL && needed)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null", name);
    if ((uintptr_t)pointer % align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be %d-byte aligned", name, pointer, (int)align);
    return KSEAL_OK;
}

/* ---- the plan: upstream's scheduler.cuh (PrefillSplitQOKVIndptr, PrefillPlanImpl) ---- */

static inline int64_t length(const int32_t *indptr, int64_t i) { return (int64_t)indptr[i + 1] - indptr[i]; }

static inline int64_t rows_of(const struct problem *p, int64_t i) { return length(p->args->qo_indptr, i); }

static inline uint32_t tile_for(const struct problem *p, int64_t packed_len) {
    if (p->args->tile_q != 0)
        return p->args->tile_q == tile_rows[SMALL] ? SMALL : p->args->tile_q == tile_rows[MIDDLE] ? MIDDLE : LARGE;
    if (packed_len > tile_rows[MIDDLE] && tiles_of(p) == TILES)
        return LARGE;
    return packed_len > tile_rows[SMALL] ? MIDDLE : SMALL;
}

/* The length that the tile is chosen for: the mean, or with a fixed grid what the longest sequence can have. */
static inline int64_t typical_len(const struct problem *p, int64_t rows) {
    const args_t *a = p->args;
    int64_t longest = at_least(a->total_q - a->batch_size + 1, 1);
    return p->fixed_grid ? longest * p->group_size : rows * p->group_size / a->batch_size;
}

/* Tiles of query rows that sequences with all of total_q can make. */
static inline int64_t most_tiles(const struct problem *p, uint32_t tile) {
    return div_up(p->args->total_q * p->group_size, tile_rows[tile]) + p->args->batch_size - 1;
}

/* Thread blocks over one KV head that any plan for args with this tile has. May be large, not negative. */
static inline int64_t most_blocks(const struct problem *p, uint32_t tile) {
    int64_t tiles = most_tiles(p, tile), chunk = p->args->kv_chunk / keys_of_page(p), blocks;
    if (chunk > 0)
        return __builtin_mul_overflow(tiles, at_least(div_up(p->total_pages, chunk), 1), &blocks) ? INT64_MAX : blocks;
    return p->args->kv_chunk == UNSPLIT && !p->fixed_grid ? tiles : at_least(tiles, p->splittable_blocks);
}

static inline int64_t parts_of(const struct problem *p, int64_t chunk, int64_t i) {
    return div_up(at_least(pages_of(p, i), 1), chunk);
}

static inline int64_t blocks_of(const struct problem *p, uint32_t tile, int64_t chunk, int64_t i) {
    return div_up(rows_of(p, i) * p->group_size, tile_rows[tile]) * parts_of(p, chunk, i);
}

/* Thread blocks with this chunk, or more than COUNT_END. */
static inline int64_t count_blocks(const struct problem *p, uint32_t tile, int64_t chunk) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < p->args->batch_size && blocks < COUNT_END; i++)
        blocks += blocks_of(p, tile, chunk, i);
    return blocks;
}

/* The shortest chunk with which no more thread blocks are needed than can be resident. */
static inline int64_t choose_chunk(const struct problem *p, uint32_t tile, int64_t longest) {
    int64_t low = at_least(SHORTEST_CHUNK / keys_of_page(p), 1), high = longest;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (count_blocks(p, tile, middle) > p->splittable_blocks)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline int64_t longest_kv(const struct problem *p) {
    int64_t longest = 1;
    for (int64_t i = 0; i < p->args->batch_size; i++)
        longest = at_least(longest, pages_of(p, i));
    return longest;
}

static inline uint64_t place(struct head *head, int array, uint64_t align, uint64_t bytes) {
    head->at[array] = align_up(head->bytes, align);
    return head->bytes = head->at[array] + bytes;
}

/* Where everything lies, for `grid` thread blocks over `rows` query rows. */
static inline void lay_out(struct head *head, const struct problem *p, uint64_t grid, uint64_t rows, bool split) {
    uint64_t ends = (uint64_t)(p->args->batch_size + 1) * sizeof(int32_t), indices = grid * sizeof(int32_t);
    head->bytes = sizeof *head;
    place(head, Q_INDPTR, 16, ends);
    for (int array = Q_INDPTR + 1; array < REQUESTS; array++) {
        int64_t count;
        keys_of(p, array, &count);
        place(head, array, 16, (uint64_t)count * sizeof(int32_t));
    }
    place(head, REQUESTS, 16, indices);
    place(head, Q_TILES, 16, indices);
    place(head, KV_TILES, 16, indices);
    place(head, O_INDPTR, 16, ends);
    place(head, CHUNK, 1, sizeof(int32_t));
    if (p->fixed_grid)
        place(head, ROWS, 16, sizeof(uint32_t));
    if (split)
        place(head, MERGE_INDPTR, 16, (rows + 1) * sizeof(int32_t));
    if (p->fixed_grid)
        place(head, VALID, 16, grid);
}

/* Scratch for the parts of `grid` thread blocks: o in float32's room, though the kernels leave the element type, and lse. */
static inline void lay_out_parts(struct head *head, const struct problem *p, uint64_t grid, uint32_t tile) {
    uint64_t heads = (uint64_t)p->args->num_q_heads, group = (uint64_t)p->group_size;
    uint64_t rows = (grid * tile_rows[tile] + group - 1) / group;
    head->part_lse_at = align_up(heads * rows * (uint64_t)p->v_dim * sizeof(float), 16);
    head->workspace_bytes = head->part_lse_at + heads * rows * sizeof(float);
}

static inline kseal_status check_blocks(const args_t *a, int64_t blocks) {
    if (blocks >= COUNT_END)
        REFUSE(KSEAL_OVERFLOW, "kv_chunk is %lld; with %lld rows of q in %lld sequences that can be 2^31 thread blocks or more",
               (long long)a->kv_chunk, (long long)a->total_q, (long long)a->batch_size);
    return KSEAL_OK;
}

/* Raises both to the most that plan and workspace can need for args, whatever the lengths. */
static inline kseal_status largest(const struct problem *p, uint64_t *plan_bytes, uint64_t *workspace_bytes) {
    uint32_t only = tile_for(p, typical_len(p, p->args->total_q)), first = only, end = only + 1;
    if (p->args->tile_q == 0 && !p->fixed_grid)
        first = SMALL, end = tiles_of(p);
    for (uint32_t tile = first; tile < end; tile++) {
        struct head head = {0};
        int64_t blocks = most_blocks(p, tile);
        CHECK(check_blocks(p->args, blocks));
        lay_out(&head, p, (uint64_t)blocks, (uint64_t)p->args->total_q, p->args->kv_chunk != UNSPLIT);
        if (p->args->kv_chunk != UNSPLIT)
            lay_out_parts(&head, p, (uint64_t)blocks, tile);
        *plan_bytes = head.bytes > *plan_bytes ? head.bytes : *plan_bytes;
        *workspace_bytes = head.workspace_bytes > *workspace_bytes ? head.workspace_bytes : *workspace_bytes;
    }
    return KSEAL_OK;
}

static inline kseal_status check_indptr(const char *name, const int32_t *indptr, int64_t batch_size, const char *total_name,
                                 int64_t total) {
    if (indptr[0] != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s[0] is %d; it must be 0", name, indptr[0]);
    for (int64_t i = 0; i < batch_size; i++)
        if (indptr[i + 1] < indptr[i])
            REFUSE(KSEAL_INVALID_ARGUMENT, "%s[%lld] is %d; it must not be below the one before it, %d", name,
                   (long long)(i + 1), indptr[i + 1], indptr[i]);
    if (indptr[batch_size] > total)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s[%lld] is %d; it must not be above %s, %lld", name, (long long)batch_size,
               indptr[batch_size], total_name, (long long)total);
    return KSEAL_OK;
}

/* The plan's arrays that have an entry for each thread block and each query row. */
static inline void deal_out(const struct problem *p, const struct head *head, int64_t chunk) {
    const args_t *a = p->args;
    char *plan = a->plan;
    int32_t *requests = (int32_t *)(void *)(plan + head->at[REQUESTS]), *q_tiles = (int32_t *)(void *)(plan + head->at[Q_TILES]),
            *kv_tiles = (int32_t *)(void *)(plan + head->at[KV_TILES]), *o_indptr = (int32_t *)(void *)(plan + head->at[O_INDPTR]),
            *merge = head->split ? (int32_t *)(void *)(plan + head->at[MERGE_INDPTR]) : NULL;
    int64_t block = 0, row = 0;
    for (int64_t i = 0; i < a->batch_size; i++) {
        int64_t rows = rows_of(p, i), tiles = div_up(rows * p->group_size, tile_rows[head->tile]);
        int64_t chunks = parts_of(p, chunk, i);
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t part = 0; part < chunks; part++, block++) {
                requests[block] = (int32_t)i;
                q_tiles[block] = (int32_t)tile;
                kv_tiles[block] = (int32_t)part;
            }
        o_indptr[i + 1] = (int32_t)(o_indptr[i] + rows * chunks);
        for (int64_t n = 0; merge != NULL && n < rows; n++, row++)
            merge[row + 1] = (int32_t)(merge[row] + chunks);
    }
    if (p->fixed_grid)
        memset(plan + head->at[VALID], 1, (size_t)block);
}

static inline void write_plan(const struct problem *p, const struct head *head, int64_t chunk) {
    const args_t *a = p->args;
    char *plan = a->plan;
    size_t ends = (size_t)(a->batch_size + 1) * sizeof(int32_t);
    int32_t stored = a->kv_chunk != UNSPLIT ? (int32_t)(chunk * keys_of_page(p)) : -1;
    memset(plan, 0, head->bytes); /* what is padding too: the same step gives the same bytes */
    memcpy(plan, head, sizeof *head);
    memcpy(plan + head->at[Q_INDPTR], a->qo_indptr, ends);
    for (int array = Q_INDPTR + 1; array < REQUESTS; array++) {
        int64_t count;
        const int32_t *values = keys_of(p, array, &count);
        memcpy(plan + head->at[array], values, (size_t)count * sizeof(int32_t));
    }
    memcpy(plan + head->at[CHUNK], &stored, sizeof stored);
    if (p->fixed_grid)
        memcpy(plan + head->at[ROWS], (const int32_t *)a->qo_indptr + a->batch_size, sizeof(uint32_t));
    deal_out(p, head, chunk);
}

/* How many pages a part has, and whether any sequence has several parts. */
static inline int64_t chunk_of(const struct problem *p, uint32_t tile, bool *split) {
    const args_t *a = p->args;
    *split = false;
    if (a->kv_chunk == UNSPLIT)
        return INT64_MAX / 2;
    int64_t longest = longest_kv(p);
    int64_t chunk = a->kv_chunk == CHOSEN ? choose_chunk(p, tile, longest) : a->kv_chunk / keys_of_page(p);
    *split = p->fixed_grid || chunk < longest;
    return chunk;
}

/* Rows of parts: the largest entry of o_indptr and merge_indptr. */
static inline int64_t part_rows(const struct problem *p, int64_t chunk) {
    int64_t rows = 0;
    for (int64_t i = 0; i < p->args->batch_size && rows < OFFSET_END; i++)
        rows += rows_of(p, i) * parts_of(p, chunk, i);
    return rows;
}

static inline kseal_status check_parts(const struct problem *p, int64_t chunk) {
    const args_t *a = p->args;
    int64_t rows = part_rows(p, chunk);
    if (rows >= COUNT_END || !product_below(OFFSET_END, rows, a->num_q_heads * p->v_dim, 1))
        REFUSE(KSEAL_OVERFLOW, "kv_chunk is %lld; it makes %lld rows of parts: times num_q_heads * " V_DIM ", %lld, they must be below 2^32",
               (long long)a->kv_chunk, (long long)rows, (long long)(a->num_q_heads * p->v_dim));
    return KSEAL_OK;
}

static inline kseal_status check_room(const args_t *a, const struct head *head) {
    if (a->workspace_bytes < head->workspace_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; this plan needs %llu", (unsigned long long)a->workspace_bytes,
               (unsigned long long)head->workspace_bytes);
    if (a->plan_bytes < head->bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "plan_bytes is %llu; this plan needs %llu", (unsigned long long)a->plan_bytes,
               (unsigned long long)head->bytes);
    return KSEAL_OK;
}

static inline kseal_status plan(const struct problem *p, uint64_t *bytes) {
    const args_t *a = p->args;
    int64_t rows = ((const int32_t *)a->qo_indptr)[a->batch_size];
    uint32_t tile = tile_for(p, typical_len(p, rows));
    bool split;
    int64_t chunk = chunk_of(p, tile, &split), blocks = count_blocks(p, tile, chunk);
    int64_t grid = p->fixed_grid ? most_blocks(p, tile) : blocks;
    CHECK(check_blocks(a, at_least(grid, blocks)));
    struct head head = {
        .magic = MAGIC,
        .batch_size = a->batch_size,
        .total_q = a->total_q,
        .KV_TOTAL = a->KV_TOTAL,
        .kv_chunk = a->kv_chunk,
        .head_dim = p->head_dim,
        .v_dim = p->v_dim,
        .num_q_heads = a->num_q_heads,
        .num_kv_heads = a->num_kv_heads,
        .fixed_grid = a->fixed_grid,
        .tile = tile,
        .grid = (uint32_t)grid,
        .rows = (uint32_t)(p->fixed_grid ? a->total_q : rows),
        .split = split,
        .page_size = (uint32_t)p->page_size,
    };
    lay_out(&head, p, head.grid, head.rows, split);
    if (split) {
        lay_out_parts(&head, p, head.grid, tile);
        CHECK(check_parts(p, chunk));
    }
    if (a->plan != NULL) {
        CHECK(check_room(a, &head));
        write_plan(p, &head, chunk);
    }
    *bytes = head.bytes;
    return KSEAL_OK;
}

/* ---- the run ---- */

static inline kseal_status check_match(const char *name, int64_t given, int64_t planned) {
    if (given != planned)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; the plan was made for %lld", name, (long long)given, (long long)planned);
    return KSEAL_OK;
}

#define MATCH_AS(field, name) CHECK(check_match(name, a->field, head->field))
#define MATCH(field) MATCH_AS(field, #field)
#define WORD(field) #field
#define MATCH_OWN(field) MATCH_AS(field, WORD(field))

static inline kseal_status check_head(const struct problem *p, const struct head *head) {
    const args_t *a = p->args;
    if (head->magic != MAGIC)
        REFUSE(KSEAL_INVALID_ARGUMENT, "plan holds no plan; kseal_" OP "_plan writes one");
    CHECK(check_match("head_dim", p->head_dim, head->head_dim));
    CHECK(check_match(V_DIM, p->v_dim, head->v_dim));
    MATCH(batch_size);
    MATCH(total_q);
    MATCH_OWN(KV_TOTAL);
    MATCH(num_q_heads);
    MATCH(num_kv_heads);
    MATCH(kv_chunk);
    MATCH(fixed_grid);
    CHECK(check_match("page_size", p->page_size, head->page_size));
    if (head->split && a->workspace_bytes < head->workspace_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; the plan needs %llu", (unsigned long long)a->workspace_bytes,
               (unsigned long long)head->workspace_bytes);
    return KSEAL_OK;
}

static inline kseal_status read_head(const struct problem *p, struct head *head) {
    const args_t *a = p->args;
    CHECK(check_pointer("plan", a->plan, LIMIT(ALIGN_PLAN), true));
    if (a->plan_bytes < sizeof *head)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "plan_bytes is %llu; a plan has at least %zu", (unsigned long long)a->plan_bytes,
               sizeof *head);
    memcpy(head, a->plan, sizeof *head);
    return check_head(p, head);
}

static inline kseal_status check_pointers(const args_t *a, const struct head *head, bool keys) {
    CHECK(check_pointer("q", a->q, LIMIT(ALIGN_Q), true));
    CHECK(check_pointer("k", a->k, LIMIT(ALIGN_K), keys));
    CHECK(check_pointer("v", a->v, LIMIT(ALIGN_V), keys));
    CHECK(check_pointer("o", a->o, LIMIT(ALIGN_O), true));
    CHECK(check_pointer("lse", a->lse, LIMIT(ALIGN_LSE), false));
    CHECK(check_pointer("plan_device", a->plan_device, LIMIT(ALIGN_PLAN_DEVICE), true));
    return check_pointer("workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), head->split);
}

/* What cuda::fast_mod_div computes on the host: n / value is (n + add) * multiplier >> 32 >> shift. */
static inline struct divisor divisor_of(uint32_t value) {
    struct divisor d = {.divisor = value, .shift = 31 - __builtin_clz(value), .value = value};
    if ((value & (value - 1)) != 0) {
        uint64_t power = (uint64_t)1 << (32 + d.shift);
        bool short_of = power % value < value - ((uint32_t)1 << d.shift);
        d.multiplier = (uint32_t)(power / value + !short_of);
        d.add = short_of;
    }
    return d;
}

static inline const void *in_plan(const args_t *a, const struct head *head, int array) {
    return head->at[array] == 0 ? NULL : (const char *)a->plan_device + head->at[array];
}

/* Where the tiles' kernels put o and lse: in parts, or at once where they belong. */
static inline void *tiles_o(const args_t *a, const struct head *head) { return head->split ? a->workspace : a->o; }

static inline float *tiles_lse(const args_t *a, const struct head *head) {
    return head->split ? (float *)(void *)((char *)a->workspace + head->part_lse_at) : a->lse;
}

static inline kseal_status launch_tiles(const struct kseal_handle *handle, const void *params, const struct problem *p,
                                 const struct head *head) {
    const struct kseal_launch launch = {
        .grid = {head->grid, 1, (uint32_t)p->args->num_kv_heads},
        .block = {WARP, head->tile == SMALL ? 1 : WARPS, head->tile == SMALL ? WARPS : 1},
        .kernel = head->tile,
        .pdl = p->args->pdl != 0,
        .stream = p->args->stream,
    };
    void *all[] = {(void *)(uintptr_t)params};
    return kseal_handle_launch_kernel(handle, &launch, all);
}

static inline kseal_status launch_merge(const struct kseal_handle *handle, const struct problem *p,
                                        const struct head *head) {
    const args_t *a = p->args;
    uint32_t threads_x = (uint32_t)p->v_dim / MERGE_VEC, heads = (uint32_t)a->num_q_heads, max_rows = head->rows;
    int64_t needed = div_up((int64_t)max_rows * heads, handle->sm_count);
    const struct kseal_launch launch = {
        .grid = {handle->sm_count * (uint32_t)at_most(MERGE_BLOCKS_PER_SM, needed), 1, 1},
        .block = {threads_x, MERGE_THREADS / threads_x, 1},
        .kernel = tiles_of(p),
        .pdl = a->pdl != 0,
        .stream = a->stream,
    };
    const void *parts = tiles_o(a, head), *indptr = in_plan(a, head, MERGE_INDPTR), *rows = in_plan(a, head, ROWS);
    const float *part_lse = tiles_lse(a, head);
    void *all[] = {&parts, &part_lse, &indptr, (void *)(uintptr_t)&a->o, (void *)(uintptr_t)&a->lse, &max_rows, &rows, &heads};
    return kseal_handle_launch_kernel(handle, &launch, all);
}

/* `params` is the parameter of the tiles' kernels. */
static inline kseal_status launch(const struct kseal_handle *handle, const void *params, const struct problem *p,
                           const struct head *head) {
    if (head->grid == 0)
        return KSEAL_OK;
    CHECK(launch_tiles(handle, params, p, head));
    return head->split ? launch_merge(handle, p, head) : KSEAL_OK;
}

/* ---- what functions of abi/generated/kernseal_ops.h do ---- */

static inline kseal_status measure(const struct kseal_handle *handle, const args_t *args, uint64_t *plan_bytes,
                            uint64_t *workspace_bytes) {
    struct problem p = problem_of(handle, args);
    bool empty;
    *plan_bytes = *workspace_bytes = 0;
    CHECK(check_sizes(args, &p, &empty));
    return empty ? KSEAL_OK : largest(&p, plan_bytes, workspace_bytes);
}

static inline kseal_status measure_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    uint64_t plan_bytes, workspace_bytes;
    CHECK(measure(handle, args, &plan_bytes, &workspace_bytes));
    *bytes = workspace_bytes;
    return KSEAL_OK;
}

static inline kseal_status measure_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    uint64_t plan_bytes, workspace_bytes;
    CHECK(measure(handle, args, &plan_bytes, &workspace_bytes));
    *bytes = plan_bytes;
    return KSEAL_OK;
}

static inline kseal_status make_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    bool empty;
    CHECK(check_sizes(args, &p, &empty));
    if (empty) {
        *bytes = 0;
        return KSEAL_OK;
    }
    CHECK(check_planned(args));
    return plan(&p, bytes);
}

#endif
