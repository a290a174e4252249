// GDN prefill from C++: a complete host in one file.
//
//     c++ -std=c++17 -I BUNDLE gdn_prefill.cpp -ldl -o gdn_prefill && ./gdn_prefill BUNDLE
//
// BUNDLE is a bundle's folder, such as dist/sm_90a-linux-x86_64. The headers come from there at compile time, and
// kernseal_pins.h among them is what this program trusts. At run time it needs libc, the CUDA driver and the folder.

#include "kernseal.hpp"
#include "kernseal_pins.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string &why) { throw std::runtime_error(why); }

// ---- the CUDA driver, as much of it as this example needs; a serving runtime has one already ----

class Cuda {
  public:
    Cuda() {
        int device = 0;
        void *context = nullptr;
        call("cuInit", 0u);
        call("cuDeviceGet", &device, 0);
        call("cuDevicePrimaryCtxRetain", &context, device);
        call("cuCtxSetCurrent", context);
    }

    template <class... Args> void call(const char *name, Args... args) const {
        void *symbol = library_ != nullptr ? dlsym(library_, name) : nullptr;
        if (symbol == nullptr)
            fail(std::string("libcuda.so.1 is not there or has no ") + name);
        if (int code = reinterpret_cast<int (*)(Args...)>(symbol)(args...); code != 0)
            fail(std::string(name) + ": CUDA error " + std::to_string(code));
    }

  private:
    void *library_ = dlopen("libcuda.so.1", RTLD_NOW);
};

// Device memory with a copy of `values` in it.
template <class T> class Memory {
  public:
    Memory(const Cuda &cuda, const std::vector<T> &values) : cuda_(cuda), count_(values.size()) {
        cuda_.call("cuMemAlloc_v2", &address_, count_ * sizeof(T));
        cuda_.call("cuMemcpyHtoD_v2", address_, static_cast<const void *>(values.data()), count_ * sizeof(T));
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        try {
            cuda_.call("cuMemFree_v2", address_);
        } catch (const std::exception &) { // the driver is going down; so is the memory
        }
    }

    void *get() const { return reinterpret_cast<void *>(address_); }

    std::vector<T> read() const {
        std::vector<T> values(count_);
        cuda_.call("cuMemcpyDtoH_v2", static_cast<void *>(values.data()), address_, count_ * sizeof(T));
        return values;
    }

  private:
    const Cuda &cuda_;
    std::size_t count_;
    std::uint64_t address_ = 0;
};

using Bf16 = std::uint16_t;

Bf16 to_bf16(float value) { // exact for the values used here
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<Bf16>(bits >> 16);
}

float from_bf16(Bf16 value) {
    const std::uint32_t bits = std::uint32_t{value} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

void expect(const char *what, float got, float wanted) {
    if (!(std::fabs(got - wanted) < 1e-2f))
        fail(std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

void run(const std::string &folder) {
    const Cuda cuda;

    // 1. Read the library once, compare it with the hash that this program was compiled with, load those bytes, and open the
    //    bundle. Images are checked against hashes compiled into the library when they are loaded.
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);

    // 2. Prepare what does not change between runs: may allocate, must not be under graph capture.
    auto config = kernseal::GdnPrefill::config();
    config.device = -1; // that of the current context
    config.dtype = KSEAL_DTYPE_BF16;
    config.state_dtype = KSEAL_DTYPE_F32;
    config.state_layout = KSEAL_STATE_LAYOUT_HVK;
    config.index_dtype = KSEAL_DTYPE_I64;
    config.initial_state = config.alpha = config.beta = 1;
    const auto prefill = bundle.prepare<kernseal::GdnPrefill>(config);

    // 3. One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both.
    constexpr int T = 2, D = 128;
    std::vector<Bf16> q(T * D), k(T * D);
    k[0] = k[D + 1] = q[0] = q[D] = q[D + 1] = to_bf16(1.0f);
    const std::vector<float> zeros(D * D);
    const Memory<Bf16> d_q(cuda, q), d_k(cuda, k), d_v(cuda, std::vector<Bf16>(T * D, to_bf16(1.0f)));
    const Memory<Bf16> d_o(cuda, std::vector<Bf16>(T * D));
    const Memory<float> d_alpha(cuda, {1.0f, 0.5f}); // linear: exp(g), not g
    const Memory<float> d_beta(cuda, {1.0f, 0.25f});
    const Memory<float> d_before(cuda, zeros), d_after(cuda, zeros);
    const Memory<std::int64_t> d_ends(cuda, {0, T});

    auto args = kernseal::GdnPrefill::args();
    args.num_q_heads = args.num_k_heads = args.num_v_heads = 1;
    args.head_dim = D;
    args.scale = 1.0f;
    args.total_tokens = T;
    args.num_seqs = 1;
    args.q = d_q.get();
    args.k = d_k.get();
    args.v = d_v.get();
    args.o = d_o.get();
    args.alpha = d_alpha.get();
    args.beta = d_beta.get();
    args.initial_state = d_before.get();
    args.final_state = d_after.get();
    args.cu_seqlens = d_ends.get();
    args.workspace_bytes = prefill.workspace_size(args);
    const Memory<unsigned char> d_workspace(cuda, std::vector<unsigned char>(args.workspace_bytes));
    args.workspace = d_workspace.get();

    // 4. Run: validates and launches on args.stream (here the default one), nothing else. Then wait, as with any launch.
    prefill.run(args);
    cuda.call("cuCtxSynchronize");

    // 5. The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both.
    const auto out = d_o.read();
    const auto state = d_after.read();
    for (int i = 0; i < D; i++) {
        expect("o of token 0", from_bf16(out[i]), 1.0f);
        expect("o of token 1", from_bf16(out[D + i]), 0.75f);
        expect("column 0 of the state", state[i * D], 0.5f);
        expect("column 1 of the state", state[i * D + 1], 0.25f);
        expect("column 2 of the state", state[i * D + 2], 0.0f);
    }
    std::puts("ok: two tokens of GDN prefill, output and state as expected");
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc != 2)
            fail("usage: gdn_prefill BUNDLE");
        run(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
