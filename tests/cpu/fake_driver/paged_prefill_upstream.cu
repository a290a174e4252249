// Upstream's own host launcher, unpatched, for the parameter struct of our program, behind a C function that the tests can call.
#include "paged_prefill.cu"

struct upstream_call {
  uint32_t tile, q_heads, kv_heads, page_size, batch_size, grid, rows, pdl;
  uint32_t q_row, q_head, kv_page, kv_row, kv_head;
  float sm_scale;
  char *q, *k, *v, *page_indices, *o, *lse, *plan, *parts, *part_lse, *stream;
  // in the plan, or 0
  uint64_t q_indptr, page_indptr, kv_lens, requests, q_tiles, kv_tiles, o_indptr, chunk, all_rows, merge_indptr, valid;
};

template <typename T>
static T* in_plan(upstream_call const* c, uint64_t offset) {
  return offset == 0 ? nullptr : reinterpret_cast<T*>(c->plan + offset);
}

static paged::Params params_of(upstream_call const* c) {
  using paged::Element;
  const int64_t strides[] = {c->kv_page, c->kv_row, c->kv_head};
  paged::Params p;
  p.q = reinterpret_cast<Element*>(c->q);
  p.paged_kv = flashinfer::paged_kv_t<Element, int32_t>(
      c->kv_heads, c->page_size, KSEAL_HEAD_DIM, c->batch_size, flashinfer::QKVLayout::kNHD, reinterpret_cast<Element*>(c->k),
      reinterpret_cast<Element*>(c->v), strides, reinterpret_cast<int32_t*>(c->page_indices), in_plan<int32_t>(c, c->page_indptr),
      /*last_page_len=*/nullptr);
  p.q_indptr = in_plan<int32_t>(c, c->q_indptr);
  p.kv_lens = in_plan<int32_t>(c, c->kv_lens);
  p.o = reinterpret_cast<Element*>(c->o);
  p.lse = reinterpret_cast<float*>(c->lse);
  p.group_size = flashinfer::uint_fastdiv(c->q_heads / c->kv_heads);
  p.sm_scale = c->sm_scale;
  p.num_qo_heads = c->q_heads;
  p.q_stride_n = c->q_row, p.q_stride_h = c->q_head;
  p.window_left = -1;
  p.request_indices = in_plan<int32_t>(c, c->requests);
  p.qo_tile_indices = in_plan<int32_t>(c, c->q_tiles);
  p.kv_tile_indices = in_plan<int32_t>(c, c->kv_tiles);
  p.merge_indptr = in_plan<int32_t>(c, c->merge_indptr);
  p.o_indptr = in_plan<int32_t>(c, c->o_indptr);
  p.kv_chunk_size_ptr = in_plan<int32_t>(c, c->chunk);
  p.block_valid_mask = in_plan<bool>(c, c->valid);
  p.max_total_num_rows = c->rows;
  p.total_num_rows = in_plan<uint32_t>(c, c->all_rows);
  p.padded_batch_size = c->grid;
  p.partition_kv = false;
  return p;
}

template <uint32_t tile>
static cudaError_t launch(upstream_call const* c) {
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched</*SAME_KV_STRIDES=*/true, tile, KSEAL_HEAD_DIM, KSEAL_HEAD_DIM,
                                                            flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false,
                                                            paged::mask, /*USE_TOKEN_HEAD_SF=*/false, paged::Variant>(
      params_of(c), reinterpret_cast<paged::Element*>(c->parts), reinterpret_cast<float*>(c->part_lse), c->pdl != 0,
      reinterpret_cast<cudaStream_t>(c->stream));
}

extern "C" int upstream_launch(upstream_call const* c, char* error) try {
  switch (c->tile) {
    case 16: return launch<16>(c);
    case 64: return launch<64>(c);
    case 128: return launch<128>(c);
    default: return -1;
  }
} catch (std::exception const& what) {
  strncpy(error, what.what(), 511);
  return -2;
}
