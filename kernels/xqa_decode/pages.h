/* The paged KV cache of upstream's XQA kernels, for launch code with an OP. */
#ifndef KSEAL_XQA_DECODE_PAGES_H
#define KSEAL_XQA_DECODE_PAGES_H

#include "check.h"
#include "whole.h"

#define INDEX_END ((int64_t)1 << 32)  /* the kernels multiply rows and columns of the page table as uint32 */
#define LENGTH_END ((int64_t)1 << 31) /* seq_lens may be int32 */

/* KVCacheList<true>: passed by value. */
struct cache_list {
    const void *k, *v;
    const void *page_table;
    const void *seq_lens;
    uint32_t max_pages_per_seq;
};

static inline kseal_status check_pages(int64_t batch_size, int64_t num_pages, int64_t max_pages_per_seq, int64_t page_size) {
    CHECK(kseal_check_positive(OP, "num_pages", num_pages));
    if (num_pages > LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; the page table holds int32, so up to 2^31 are supported",
               (long long)num_pages);
    CHECK(kseal_check_max_pages(OP, max_pages_per_seq, page_size));
    if (!product_below(INDEX_END, batch_size, max_pages_per_seq, 1))
        REFUSE(KSEAL_OVERFLOW, "max_pages_per_seq is %lld; B * max_pages_per_seq must be below 2^32 (B is %lld)",
               (long long)max_pages_per_seq, (long long)batch_size);
    return KSEAL_OK;
}

#endif
