// Upstream's own launchers of the radix kernels, whole and unpatched, behind a C function that the tests can call.
// Only what runs on the host is compiled; the runtime that the launchers ask is the one below.
#ifndef __CUDA_ARCH__
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "math.cuh"
#include "topk.cuh"

extern "C" {
#include "recorder.h"
}

using namespace flashinfer::sampling;

struct upstream_call {
  uint32_t half, paged, ragged, deterministic, configurable;
  uint32_t num_rows, top_k, max_len, page_bits;
  uint32_t sms, smem_per_block, one_cta_smem, group_smem;
  int64_t row_stride, page_table_stride;
  void *scores, *lengths, *row_starts, *offsets, *page_table, *row_to_request, *page_table_starts, *indices, *values,
      *raw_indices, *semaphores, *stream;
};

static const upstream_call* now;

static std::string name_of(const void* kernel) {
  Dl_info info;
  return dladdr(kernel, &info) != 0 && info.dli_sname != nullptr ? info.dli_sname : "?";
}

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? now->sms : now->smem_per_block;
  return cudaSuccess;
}
// The third template argument of the kernel: whether one CTA has the row.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  std::memset(attributes, 0, sizeof *attributes);
  const std::string name = name_of(kernel);
  const bool one_cta = name.find("ELb1ELb") != std::string::npos;
  attributes->sharedSizeBytes = one_cta ? now->one_cta_smem : now->group_smem;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "fake error"; }
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** params, size_t smem, cudaStream_t stream) {
  struct fake_launch launch_of = {};
  launch_of.grid[0] = grid.x, launch_of.grid[1] = grid.y, launch_of.grid[2] = grid.z;
  launch_of.block[0] = block.x, launch_of.block[1] = block.y, launch_of.block[2] = block.z;
  launch_of.smem = smem;
  launch_of.stream = stream;
  fake_kernel named = {};
  name_of(kernel).copy(named.name, sizeof named.name - 1);
  return static_cast<cudaError_t>(fake_launch(&launch_of, &named, params));
}
}

template <typename T>
static cudaError_t launch(const upstream_call& c) {
  T *scores = static_cast<T*>(c.scores), *values = static_cast<T*>(c.values);
  auto ints = [](void* p) { return static_cast<int32_t*>(p); };
  auto* states = static_cast<RadixRowState*>(c.semaphores);
  auto stream = static_cast<cudaStream_t>(c.stream);
  if (c.paged) {
    // As TopKPageTableTransformDispatch does before it comes here.
    int32_t* starts = ints(c.page_table_starts != nullptr ? c.page_table_starts : c.row_starts);
    auto paged = [&](auto policy) {
      return RadixTopKPageTableTransformMultiCTA<T, int32_t, decltype(policy)>(
          scores, ints(c.indices), ints(c.page_table), c.page_table_stride, ints(c.row_to_request), ints(c.lengths),
          ints(c.row_starts), starts, c.num_rows, c.top_k, c.max_len, states, c.deterministic, stream, policy);
    };
    return c.configurable ? paged(ConfigurablePageTableKernelPolicy<int32_t>{ints(c.raw_indices), c.row_stride, c.page_bits})
                          : paged(DirectPageTableKernelPolicy<int32_t>{});
  }
  if (c.ragged)
    return RadixTopKRaggedTransformMultiCTA<T, int32_t>(scores, ints(c.indices), ints(c.offsets), ints(c.lengths),
                                                        ints(c.row_starts), c.num_rows, c.top_k, c.max_len, states,
                                                        c.deterministic, stream);
  return RadixTopKMultiCTA<T, int32_t>(scores, ints(c.indices), values, nullptr, c.num_rows, c.top_k, c.max_len, states,
                                       c.deterministic, stream);
}

extern "C" int upstream_launch(const upstream_call* c) {
  now = c;
  return c->half ? launch<nv_bfloat16>(*c) : launch<float>(*c);
}
#endif
