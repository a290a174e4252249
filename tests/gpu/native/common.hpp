// What the GPU programs share: the CUDA driver by dlopen, device memory, and a small GDN prefill whose state tells how often it ran.
#ifndef COMMON_HPP
#define COMMON_HPP

#include "kernseal.hpp"
#include "kernseal_pins.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

[[noreturn]] inline void fail(const std::string &why) { throw std::runtime_error(why); }

class Cuda {
  public:
    Cuda() {
        int count = 0;
        call("cuInit", 0u);
        call("cuDeviceGetCount", &count);
        contexts_.resize(static_cast<std::size_t>(count));
    }

    int devices() const { return static_cast<int>(contexts_.size()); }

    // Makes the primary context of a device current on this thread.
    void use(int device) {
        void *&context = contexts_.at(static_cast<std::size_t>(device));
        if (context == nullptr)
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
    std::vector<void *> contexts_;
};

// Device memory with a copy of `values` in it, on the current device. A test ends before it needs the memory back.
template <class T> class Memory {
  public:
    Memory(const Cuda &cuda, const std::vector<T> &values) : cuda_(&cuda), count_(values.size()) {
        cuda.call("cuMemAlloc_v2", &address_, count_ * sizeof(T));
        cuda.call("cuMemcpyHtoD_v2", address_, static_cast<const void *>(values.data()), count_ * sizeof(T));
    }

    void *get() const { return reinterpret_cast<void *>(address_); }

    std::vector<T> read() const {
        std::vector<T> values(count_);
        cuda_->call("cuMemcpyDtoH_v2", static_cast<void *>(values.data()), address_, count_ * sizeof(T));
        return values;
    }

  private:
    const Cuda *cuda_;
    std::size_t count_;
    std::uint64_t address_ = 0;
};

using Gdn = kernseal::Prepared<kernseal::GdnPrefill>;

inline kseal_gdn_prefill_config gdn_config(int device) {
    auto config = kernseal::GdnPrefill::config();
    config.device = device;
    config.dtype = KSEAL_DTYPE_BF16;
    config.state_dtype = KSEAL_DTYPE_F32;
    config.state_layout = KSEAL_STATE_LAYOUT_HVK;
    config.index_dtype = KSEAL_DTYPE_I64;
    config.initial_state = config.alpha = config.beta = 1;
    return config;
}

inline Gdn prepare(const kernseal::Bundle &bundle, int device) { return bundle.prepare<kernseal::GdnPrefill>(gdn_config(device)); }

// One token that moves column 0 of the state, in place, by 1/8192 of what is missing to `value`: every launch leaves another
// state, and the state after n launches depends on n and `value` alone.
class Problem {
  public:
    Problem(const Cuda &cuda, const Gdn &prefill, float value, void *stream)
        : q_(cuda, first(1.0f)), k_(cuda, first(1.0f)), v_(cuda, std::vector<std::uint16_t>(D, bf16(value))),
          o_(cuda, std::vector<std::uint16_t>(D)), alpha_(cuda, {1.0f}), beta_(cuda, {1.0f / 8192}),
          state_(cuda, std::vector<float>(D * D)), ends_(cuda, {0, 1}), args_(kernseal::GdnPrefill::args()),
          workspace_(cuda, std::vector<unsigned char>(prefill.workspace_size(args_))) {
        args_.num_q_heads = args_.num_k_heads = args_.num_v_heads = 1;
        args_.head_dim = D;
        args_.scale = 1.0f;
        args_.total_tokens = args_.num_seqs = 1;
        args_.q = q_.get();
        args_.k = k_.get();
        args_.v = v_.get();
        args_.o = o_.get();
        args_.alpha = alpha_.get();
        args_.beta = beta_.get();
        args_.initial_state = args_.final_state = state_.get();
        args_.cu_seqlens = ends_.get();
        args_.workspace_bytes = prefill.workspace_size(args_);
        args_.workspace = workspace_.get();
        args_.stream = stream;
    }

    const kseal_gdn_prefill_args &args() const { return args_; }
    std::vector<float> state() const { return state_.read(); }

  private:
    static constexpr int D = 128;

    static std::uint16_t bf16(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return static_cast<std::uint16_t>(bits >> 16);
    }

    static std::vector<std::uint16_t> first(float value) {
        std::vector<std::uint16_t> row(D);
        row[0] = bf16(value);
        return row;
    }

    Memory<std::uint16_t> q_, k_, v_, o_;
    Memory<float> alpha_, beta_, state_;
    Memory<std::int64_t> ends_;
    kseal_gdn_prefill_args args_;
    Memory<unsigned char> workspace_;
};

#endif
