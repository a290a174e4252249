// Upstream's own host launcher for MLA, whole and unpatched, behind a C function that the tests can call.
#include "mla_sm120.cu"
#include "tensorMap.cpp"

struct upstream_call {
  uint32_t sms, max_seq_len, batch, pdl;
  float q_scale, kv_scale;
  void *q_scale_ptr, *output, *q, *k, *v, *page_table, *seq_lens, *kv_scale_ptr, *semaphores, *scratch, *stream;
  uint64_t page_stride, token_stride, head_stride;
};

extern "C" void upstream_launch(upstream_call const* c) {
  launchMLAFlashInfer(c->sms, 1, c->q_scale, static_cast<float const*>(c->q_scale_ptr), static_cast<OutputHead*>(c->output),
                      static_cast<InputHead const*>(c->q), static_cast<GMemCacheHead*>(c->k),
                      static_cast<GMemCacheHead*>(c->v), static_cast<KVCachePageIndex const*>(c->page_table),
                      c->max_seq_len, static_cast<uint32_t const*>(c->seq_lens), c->batch, c->kv_scale,
                      static_cast<float const*>(c->kv_scale_ptr), static_cast<uint32_t*>(c->semaphores), c->scratch,
                      c->pdl != 0, c->page_stride, c->token_stride, c->head_stride, static_cast<cudaStream_t>(c->stream));
}
