// XQA decode from C++: a complete host in one file, once by itself and once more in a CUDA graph.
//
//     c++ -std=c++17 -I BUNDLE xqa_decode.cpp -ldl -o xqa_decode && ./xqa_decode BUNDLE
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
#include <utility>
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
        write(values);
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

    void write(const std::vector<T> &values) const {
        cuda_.call("cuMemcpyHtoD_v2", address_, static_cast<const void *>(values.data()), count_ * sizeof(T));
    }

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

constexpr int B = 2, GROUP = 8, D = 128, PAGE = 16, PAGES = 4;

void expect(const char *what, float got, float wanted) {
    if (!(std::fabs(got - wanted) < 1e-2f))
        fail(std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

void expect_output(const std::vector<Bf16> &o, float sequence0, float sequence1) {
    for (int i = 0; i < GROUP * D; i++) {
        expect("o of sequence 0", from_bf16(o[i]), sequence0);
        expect("o of sequence 1", from_bf16(o[GROUP * D + i]), sequence1);
    }
}

void run(const std::string &folder) {
    const Cuda cuda;
    void *stream = nullptr;
    cuda.call("cuStreamCreate", &stream, 0u);

    // README: begin
    // 1. Read the library once, compare it with the hash that this program was compiled with, load those bytes, and open the
    //    bundle. Images are checked against hashes compiled into the library when they are loaded.
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);

    // 2. Prepare what does not change between runs: may allocate, must not be under graph capture.
    auto config = kernseal::XqaDecode::config();
    config.device = -1; // that of the current context
    config.dtype = config.kv_dtype = config.out_dtype = KSEAL_DTYPE_BF16;
    config.head_dim = D;
    config.group_size = GROUP;
    config.page_size = PAGE;
    const auto decode = bundle.prepare<kernseal::XqaDecode>(config);

    // 3. Sizes, addresses and the stream of one run, and scratch of the size that it asks for.
    auto args = kernseal::XqaDecode::args();
    args.num_kv_heads = 1;
    args.num_q_heads = GROUP;
    args.q_scale = 1.0f;
    args.batch_size = B;
    args.num_pages = PAGES;
    args.max_pages_per_seq = 2;
    args.stream = stream;
    args.workspace_bytes = decode.workspace_size(args);
    args.semaphores_bytes = decode.semaphores_size(args);
    // README: end

    // Pages 3 and 1 hold the 20 positions of sequence 0, page 0 the 3 of sequence 1. Row t of V is t + 1. The keys of sequence 0
    // are all zero, so its output is the mean of its rows; in sequence 1 the key of position 1 outweighs the others.
    std::vector<Bf16> q(B * GROUP * D), k(PAGES * PAGE * D), v(PAGES * PAGE * D);
    for (int head = 0; head < B * GROUP; head++)
        q[head * D] = to_bf16(8.0f);
    k[1 * D] = to_bf16(100.0f);
    for (const auto &[page, first] : {std::pair{3, 0}, {1, PAGE}, {0, 0}})
        for (int row = 0; row < PAGE; row++)
            for (int i = 0; i < D; i++)
                v[(page * PAGE + row) * D + i] = to_bf16(static_cast<float>(first + row + 1));
    const Memory<Bf16> d_q(cuda, q), d_k(cuda, k), d_v(cuda, v), d_o(cuda, std::vector<Bf16>(B * GROUP * D));
    const Memory<std::int32_t> d_pages(cuda, {3, 1, 0, -1}), d_lengths(cuda, {20, 3});

    args.q = d_q.get();
    args.k = d_k.get();
    args.v = d_v.get();
    args.o = d_o.get();
    args.page_table = d_pages.get();
    args.seq_lens = d_lengths.get();
    // At least one byte: a size may be 0. Semaphores are zero before the first launch.
    const Memory<unsigned char> d_workspace(cuda, std::vector<unsigned char>(args.workspace_bytes + 1));
    const Memory<unsigned char> d_semaphores(cuda, std::vector<unsigned char>(args.semaphores_bytes + 1));
    args.workspace = d_workspace.get();
    args.semaphores = d_semaphores.get();

    // README: begin
    // 4. Run: validates and launches on args.stream, nothing else. Then wait, as with any launch.
    decode.run(args);
    // README: end
    cuda.call("cuStreamSynchronize", stream);
    expect_output(d_o.read(), 10.5f, 2.0f);

    // 5. The same in a graph: capturing launches nothing, and a replay reads the memory as it is then.
    void *graph = nullptr, *executable = nullptr;
    cuda.call("cuStreamBeginCapture_v2", stream, 0);
    decode.run(args);
    cuda.call("cuStreamEndCapture", stream, &graph);
    cuda.call("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
    for (const std::int32_t length : {1, 20, 3}) {
        d_lengths.write({length, 2});
        cuda.call("cuGraphLaunch", executable, stream);
        cuda.call("cuStreamSynchronize", stream);
        expect_output(d_o.read(), static_cast<float>(length + 1) / 2, 2.0f);
    }
    cuda.call("cuGraphExecDestroy", executable);
    cuda.call("cuGraphDestroy", graph);
    cuda.call("cuStreamDestroy_v2", stream);
    std::puts("ok: two sequences of XQA decode, output as expected, also from a graph");
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc != 2)
            fail("usage: xqa_decode BUNDLE");
        run(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
