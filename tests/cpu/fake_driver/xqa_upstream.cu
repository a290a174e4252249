// Upstream's own host launchers, whole and unpatched, behind C functions that the tests can call.
#if UPSTREAM_GMMA
#include "mha_sm90.cu"
#define UPSTREAM_LAUNCH launchHopperF8MHAFlashInfer
#else
#include "mha.cu"
#define UPSTREAM_LAUNCH launchMHAFlashInfer
#endif

struct upstream_call {
  uint32_t sms, kv_heads, window, max_seq_len, batch, q_len, pdl;
  float q_scale, rcp_out_scale, kv_scale;
  void *q_scale_ptr, *output, *q, *sinks, *k, *v, *k_scales, *v_scales, *page_table, *seq_lens, *kv_scale_ptr, *q_cu_lens, *mask,
      *semaphores, *scratch, *stream;
  uint64_t page_stride, token_stride, head_stride, scale_page_stride, scale_token_stride, scale_head_stride;
};

extern "C" void upstream_launch(upstream_call const* c) {
  UPSTREAM_LAUNCH(c->sms, c->kv_heads, c->window, c->q_scale, static_cast<float const*>(c->q_scale_ptr),
                  static_cast<OutputHead*>(c->output),
#if LOW_PREC_OUTPUT
                  c->rcp_out_scale,
#endif
                  static_cast<InputHead const*>(c->q), static_cast<float const*>(c->sinks), static_cast<GMemCacheHead*>(c->k),
                  static_cast<GMemCacheHead*>(c->v),
#if ENABLE_4BIT_KV_CACHE
                  static_cast<GMemCacheHeadSf*>(c->k_scales), static_cast<GMemCacheHeadSf*>(c->v_scales),
#endif
                  static_cast<KVCachePageIndex const*>(c->page_table), c->max_seq_len, static_cast<uint32_t const*>(c->seq_lens),
                  c->batch, c->kv_scale, static_cast<float const*>(c->kv_scale_ptr),
#if SPEC_DEC
                  c->q_len, static_cast<uint32_t const*>(c->q_cu_lens), static_cast<MaskType const*>(c->mask),
#endif
                  static_cast<uint32_t*>(c->semaphores), c->scratch, c->pdl != 0, c->page_stride, c->token_stride, c->head_stride,
#if ENABLE_4BIT_KV_CACHE
                  c->scale_page_stride, c->scale_token_stride, c->scale_head_stride,
#endif
                  static_cast<cudaStream_t>(c->stream));
}

// Bytes of scratch of that many thread blocks: the kernel's own segments, in the kernel's own types.
extern "C" uint64_t upstream_scratch(uint32_t blocks) {
  static char base[1];
#if UPSTREAM_GMMA
  ScratchMem const memory{base, blocks, 1};
  return reinterpret_cast<char*>(&memory.tokens()[blocks]) - base;
#else
  MemSegmenter<false> segmenter{base};
  using Block = Vec<Array2D<LdGrain, nbValidRows, SharedMem::XSmemBuffer::cols>, gemm1WarpsPerGrp * nbHeadSplits>;
  segmenter.newSeg<SMemWarpRowMax>(blocks);
  segmenter.newSeg<SMemWarpRowMax>(blocks);
  segmenter.newSeg<Block>(blocks);
  return segmenter.getEndOffset();
#endif
}
