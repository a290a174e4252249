// Upstream's own host launcher, unpatched, for the parameter struct of our program, behind a C function that the tests can call.
#include "ragged_prefill.cu"

struct upstream_call {
  uint32_t tile, q_heads, kv_heads, grid, rows, pdl;
  uint32_t q_row, q_head, k_row, k_head, v_row, v_head;
  float sm_scale;
  char *q, *k, *v, *o, *lse, *plan, *parts, *part_lse, *stream;
  uint64_t q_indptr, kv_indptr, requests, q_tiles, kv_tiles, o_indptr, chunk, all_rows, merge_indptr, valid;  // in the plan, or 0
};

template <typename T>
static T* in_plan(upstream_call const* c, uint64_t offset) {
  return offset == 0 ? nullptr : reinterpret_cast<T*>(c->plan + offset);
}

static ragged::Params params_of(upstream_call const* c) {
  using ragged::Element;
  ragged::Params p;
  p.q = reinterpret_cast<Element*>(c->q);
  p.k = reinterpret_cast<Element*>(c->k);
  p.v = reinterpret_cast<Element*>(c->v);
  p.q_indptr = in_plan<int32_t>(c, c->q_indptr);
  p.kv_indptr = in_plan<int32_t>(c, c->kv_indptr);
  p.o = reinterpret_cast<Element*>(c->o);
  p.lse = reinterpret_cast<float*>(c->lse);
  p.group_size = flashinfer::uint_fastdiv(c->q_heads / c->kv_heads);
  p.sm_scale = c->sm_scale;
  p.num_qo_heads = c->q_heads;
  p.num_kv_heads = c->kv_heads;
  p.q_stride_n = c->q_row, p.q_stride_h = c->q_head;
  p.k_stride_n = c->k_row, p.k_stride_h = c->k_head;
  p.v_stride_n = c->v_row, p.v_stride_h = c->v_head;
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
  return flashinfer::BatchPrefillWithRaggedKVCacheDispatched<tile, KSEAL_HEAD_DIM, KSEAL_V_DIM, flashinfer::PosEncodingMode::kNone,
                                                             /*USE_FP16_QK_REDUCTION=*/false, ragged::mask,
                                                             /*USE_TOKEN_HEAD_SF=*/false, ragged::Variant>(
      params_of(c), reinterpret_cast<ragged::Element*>(c->parts), reinterpret_cast<float*>(c->part_lse), c->pdl != 0,
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
