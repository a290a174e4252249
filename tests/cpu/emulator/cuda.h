// CUDA's words for a source that runs on a CPU, for the few sources that tests run so. See emulator.h.
#pragma once
#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// A block is a thread of the operating system.
#define __shared__ static thread_local

typedef unsigned long size_t;
struct emu_index {
  unsigned x;
};
#define threadIdx (emu_index{emu_thread()})
#define blockIdx (emu_index{emu_block()})
#define gridDim (emu_index{emu_blocks()})
#define __syncthreads emu_sync

inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
  return emu_shuffle(value, int(emu_thread() % 32) - int(distance));
}
inline unsigned __shfl_down_sync(unsigned, unsigned value, unsigned distance) {
  return emu_shuffle(value, int(emu_thread() % 32) + int(distance));
}

// Others run between any two atomic operations of a thread, as they do on a GPU.
template <typename T, typename V>
inline T atomicAdd(T* at, V value) {
  const T before = __atomic_fetch_add(at, T(value), __ATOMIC_SEQ_CST);
  if (before % 64 == 7) emu_yield();
  return before;
}

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

template <typename To, typename From>
inline To emu_bits(From from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float value) { return emu_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return emu_bits<float>(bits); }

struct half {
  unsigned short bits;
};
struct nv_bfloat16 {
  unsigned short bits;
};
inline unsigned short __half_as_ushort(half value) { return value.bits; }
inline half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 value) { return value.bits; }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
