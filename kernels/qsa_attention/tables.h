/* The routes of QSA and the tables that say what their tokens select, for launch code with an OP. */
#ifndef KSEAL_QSA_TABLES_H
#define KSEAL_QSA_TABLES_H

#include "check.h"
#include "whole.h"

#define INDEX_BITS 31 /* the kernels index rows and elements with int32 */
#define INDEX_END ((int64_t)1 << INDEX_BITS)

static inline kseal_status check_routes(int64_t num_routes, int32_t most, int64_t total_q, int32_t group) {
    if (num_routes > most)
        REFUSE(KSEAL_OVERFLOW, "num_routes is %lld; at most %d are supported", (long long)num_routes, most);
    if (total_q < num_routes || total_q > num_routes * group)
        REFUSE(KSEAL_INVALID_ARGUMENT, "total_q is %lld; it must be from %lld to %lld: num_routes of 1 to %d tokens each",
               (long long)total_q, (long long)num_routes, (long long)num_routes * group, group);
    return KSEAL_OK;
}

/* `pages` that the longest sequence has. */
static inline kseal_status check_requests(int64_t num_requests, int64_t max_pages_per_request, int64_t pages) {
    if (num_requests <= 0 || num_requests >= INDEX_END)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_requests is %lld; it must be positive and below 2^31", (long long)num_requests);
    if (max_pages_per_request < pages || max_pages_per_request >= INDEX_END)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_pages_per_request is %lld; it must be at least %lld for max_seq_len, and below 2^31",
               (long long)max_pages_per_request, (long long)pages);
    return KSEAL_OK;
}

#endif
