// The patched topk.cuh on a CPU, behind a C function. The four functions that are written in PTX there are these.
#include "cuda.h"

inline int ld_acquire(int* at) {
  emu_yield();
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
// A block that has arrived rests: the others go on without what its other threads may not have written yet.
inline void red_release(int* at, int value) {
  __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
  emu_rest();
}
inline void st_release(int* at, int value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline int atom_add_release(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL); }

#include "topk_emulated.cuh"

using flashinfer::sampling::RadixDeterministicCollectScratch;
using flashinfer::sampling::RadixRowState;
using flashinfer::sampling::Scores;
using flashinfer::sampling::Transform;

struct call {
  void *params[17];
};

#define ARGUMENT(type, i) (*static_cast<type*>(c->params[i]))
#define KERNEL(name)                                                                                                     \
  static void run_##name(void* given) {                                                                                  \
    const call* c = static_cast<const call*>(given);                                                                     \
    name(ARGUMENT(Scores*, 0), ARGUMENT(int32_t*, 1), ARGUMENT(Scores*, 2), ARGUMENT(const int32_t*, 3),                  \
         ARGUMENT(int32_t*, 4), ARGUMENT(const int32_t*, 5), ARGUMENT(const int32_t*, 6), ARGUMENT(const int32_t*, 7),    \
         ARGUMENT(int64_t, 8), ARGUMENT(uint32_t, 9), ARGUMENT(uint32_t, 10), ARGUMENT(uint32_t, 11),                     \
         ARGUMENT(RadixRowState*, 12), ARGUMENT(RadixDeterministicCollectScratch*, 13), ARGUMENT(uint32_t, 14),           \
         ARGUMENT(uint32_t, 15), ARGUMENT(Transform, 16));                                                                \
  }
KERNEL(topk_one_cta)
KERNEL(topk_cta_group)

extern "C" void run_kernel(int group, unsigned blocks, unsigned long smem, void** params) {
  call c;
  for (int i = 0; i < 17; i++) c.params[i] = params[i];
  emu_launch(blocks, 1024, smem, group ? run_topk_cta_group : run_topk_one_cta, &c);
}
