// Upstream's own planning of FA2 prefill, host code alone, behind a C function. What it asks of the CUDA runtime is answered here.
#define FLASHINFER_POS_ENC_CUH_  // kernels, of which the scheduler uses nothing
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace flashinfer {
enum class PosEncodingMode { kNone, kRoPELlama, kALiBi };
using std::max;
using std::min;
}  // namespace flashinfer

#include <flashinfer/attention/scheduler.cuh>

static int sms, major, smem_optin;
extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  switch (what) {
    case cudaDevAttrMultiProcessorCount: *value = sms; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = smem_optin; return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error of CUDA's"; }

struct upstream_plan {
  int64_t info[15];
  uint64_t float_bytes, int_bytes;
};
int upstream_plan(int sms_, int major_, int smem_optin_, int32_t* qo_indptr, int32_t* kv_indptr, uint32_t rows, uint32_t batch,
                  uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim, uint32_t v_dim, uint32_t page_size, int fixed_grid,
                  int32_t chunk, int unsplit, int64_t uniform_q_len, int always_uniform, char* memory, uint64_t size,
                  struct upstream_plan* out, char* error) {
  sms = sms_, major = major_, smem_optin = smem_optin_;
  flashinfer::PrefillPlanInfo info;
  size_t float_bytes = 0, int_bytes = 0;
  try {
    flashinfer::PrefillPlanImpl<true, int32_t>(float_bytes, int_bytes, memory, size_t(1) << 50, memory, memory, size, info, qo_indptr,
                                               kv_indptr, rows, batch, q_heads, kv_heads, head_dim, v_dim, page_size,
                                               fixed_grid, /*sizeof_dtype_o=*/2, /*window_left=*/-1, chunk, unsplit,
                                               /*num_colocated_ctas=*/0, uniform_q_len, always_uniform != 0, nullptr);
  } catch (std::exception const& what) {
    strncpy(error, what.what(), 255);
    return 1;
  }
  auto values = info.ToVector();
  std::copy(values.begin(), values.end(), out->info);
  out->float_bytes = float_bytes, out->int_bytes = int_bytes;
  return 0;
}
}
