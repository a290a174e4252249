// GDN prefill from C++: a complete host in one file.
//
//     c++ -std=c++17 -I BUNDLE main.cpp -ldl -o gdn_prefill && ./gdn_prefill BUNDLE
//
// BUNDLE is a bundle's folder, such as dist/sm_90a-linux-x86_64. kernseal.h and kernseal_pins.h come from there at compile
// time: the pins are what this program trusts. At run time it needs libc, the CUDA driver and the folder, nothing else.

#include "kernseal.h"
#include "kernseal_pins.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<unsigned char>;

[[noreturn]] void fail(const std::string &why) { throw std::runtime_error(why); }

// ---- SHA-256 (FIPS 180-4), so that the check needs no library ----

constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotr(std::uint32_t x, int n) { return x >> n | x << (32 - n); }

void compress(std::array<std::uint32_t, 8> &hash, const unsigned char *block) {
    std::array<std::uint32_t, 64> w{};
    for (int i = 0; i < 64; i++) {
        if (i < 16) {
            for (int b = 0; b < 4; b++)
                w[i] = w[i] << 8 | block[4 * i + b];
            continue;
        }
        w[i] = w[i - 16] + (rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
               (rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = hash;
    for (int i = 0; i < 64; i++) {
        std::uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
        std::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++)
        hash[i] += add[i];
}

std::string sha256(Bytes data) {
    std::array<std::uint32_t, 8> hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const std::uint64_t bits = std::uint64_t{data.size()} * 8;
    data.push_back(0x80);
    while (data.size() % 64 != 56)
        data.push_back(0);
    for (int shift = 56; shift >= 0; shift -= 8)
        data.push_back(static_cast<unsigned char>(bits >> shift));
    for (std::size_t at = 0; at < data.size(); at += 64)
        compress(hash, data.data() + at);
    std::string hex;
    for (std::uint32_t word : hash)
        for (int shift = 28; shift >= 0; shift -= 4)
            hex += "0123456789abcdef"[word >> shift & 15];
    return hex;
}

// ---- libkernseal.so ----

Bytes read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file)
        fail(path + ": cannot be read");
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

// Loads these bytes and no others: from memory, sealed, so that nobody can change them after the check.
void *load(const Bytes &bytes) {
    int fd = memfd_create("libkernseal.so", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        fail("memfd_create failed");
    for (std::size_t done = 0; done < bytes.size();) {
        ssize_t wrote = write(fd, bytes.data() + done, bytes.size() - done);
        if (wrote <= 0)
            fail("memory file cannot be written");
        done += static_cast<std::size_t>(wrote);
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
        fail("memory file cannot be sealed");
    // The descriptor stays open: the dynamic linker knows the library by this name.
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        fail(dlerror());
    return library;
}

template <typename Function> Function *find(void *library, const char *name, Function *) {
    void *symbol = dlsym(library, name);
    if (symbol == nullptr)
        fail(std::string(name) + " is not in the library");
    return reinterpret_cast<Function *>(symbol);
}
// The header declares each function; its type is taken from there.
#define FIND(library, name) decltype(::name) *name = find(library, #name, static_cast<decltype(::name) *>(nullptr))

struct Kernseal {
    void *library;
    FIND(library, kseal_abi_version);
    FIND(library, kseal_status_name);
    FIND(library, kseal_last_error);
    FIND(library, kseal_open);
    FIND(library, kseal_close);
    FIND(library, kseal_gdn_prefill_prepare);
    FIND(library, kseal_gdn_prefill_workspace_size);
    FIND(library, kseal_gdn_prefill_run);
    FIND(library, kseal_gdn_prefill_release);

    void check(kseal_status status) const {
        if (status != KSEAL_OK)
            fail(std::string(kseal_status_name(status)) + ": " + kseal_last_error());
    }
};

// ---- the CUDA driver, as much of it as this example needs ----

struct Driver {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    using Address = std::uint64_t;

    template <typename... Args> void call(const char *name, Args... args) const {
        void *symbol = library != nullptr ? dlsym(library, name) : nullptr;
        if (symbol == nullptr)
            fail(std::string("libcuda.so.1 is not there or has no ") + name);
        if (int code = reinterpret_cast<int (*)(Args...)>(symbol)(args...); code != 0)
            fail(std::string(name) + ": CUDA error " + std::to_string(code));
    }

    // Device memory with a copy of `values` in it. An example ends before it needs the memory back.
    template <typename T> Address upload(const std::vector<T> &values) const {
        Address address = 0;
        call("cuMemAlloc_v2", &address, values.size() * sizeof(T));
        call("cuMemcpyHtoD_v2", address, static_cast<const void *>(values.data()), values.size() * sizeof(T));
        return address;
    }

    template <typename T> std::vector<T> download(Address address, std::size_t count) const {
        std::vector<T> values(count);
        call("cuMemcpyDtoH_v2", static_cast<void *>(values.data()), address, count * sizeof(T));
        return values;
    }
};

void *pointer(Driver::Address address) { return reinterpret_cast<void *>(address); }

using Bf16 = std::uint16_t;

Bf16 to_bf16(float value) { // exact for the values used here
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<Bf16>(bits >> 16);
}

float from_bf16(Bf16 value) {
    std::uint32_t bits = std::uint32_t{value} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

void expect(const char *what, float got, float wanted) {
    if (!(std::fabs(got - wanted) < 1e-2f))
        fail(std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

void run(const std::string &bundle_path) {
    // 1. Read the library once and compare it with the hash that this program was compiled with.
    const Bytes bytes = read_file(bundle_path + "/libkernseal.so");
    if (const std::string found = sha256(bytes); found != KSEAL_PINS_LIBRARY_SHA256)
        fail("libkernseal.so: SHA-256 is " + found + ", pinned is " KSEAL_PINS_LIBRARY_SHA256);

    // 2. Load those bytes and find its functions.
    const Kernseal ks{load(bytes)};
    if (ks.kseal_abi_version() != KSEAL_PINS_ABI_VERSION)
        fail("libkernseal.so has another ABI version than its pins");

    // 3. A context on device 0, with the driver's own functions. A serving runtime has one already.
    const Driver cuda;
    int device = 0;
    void *context = nullptr;
    cuda.call("cuInit", 0u);
    cuda.call("cuDeviceGet", &device, 0);
    cuda.call("cuDevicePrimaryCtxRetain", &context, device);
    cuda.call("cuCtxSetCurrent", context);

    // 4. Open the bundle. Its images are checked against hashes compiled into the library when they are loaded.
    kseal_open_args open_args{};
    open_args.struct_size = sizeof open_args;
    open_args.abi_version = KSEAL_ABI_VERSION;
    open_args.bundle_path = bundle_path.c_str();
    kseal_bundle *bundle = nullptr;
    ks.check(ks.kseal_open(&open_args, &bundle));

    // 5. Prepare what does not change between runs: may allocate, must not be under graph capture.
    kseal_gdn_prefill_config config{};
    config.struct_size = sizeof config;
    config.device = -1;
    config.dtype = KSEAL_DTYPE_BF16;
    config.state_dtype = KSEAL_DTYPE_F32;
    config.state_layout = KSEAL_STATE_LAYOUT_HVK;
    config.index_dtype = KSEAL_DTYPE_I64;
    config.initial_state = 1;
    config.alpha = 1;
    config.beta = 1;
    kseal_gdn_prefill *prefill = nullptr;
    ks.check(ks.kseal_gdn_prefill_prepare(bundle, &config, &prefill));

    // 6. One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both.
    constexpr int T = 2, D = 128;
    std::vector<Bf16> q(T * D), k(T * D), v(T * D, to_bf16(1.0f)), o(T * D);
    k[0] = k[D + 1] = q[0] = q[D] = q[D + 1] = to_bf16(1.0f);
    const std::vector<float> alpha{1.0f, 0.5f}; // linear: exp(g), not g
    const std::vector<float> beta{1.0f, 0.25f};
    const std::vector<float> zeros(D * D);
    const std::vector<std::int64_t> cu_seqlens{0, T};
    const Driver::Address d_o = cuda.upload(o), d_state = cuda.upload(zeros);

    kseal_gdn_prefill_args args{};
    args.struct_size = sizeof args;
    args.num_q_heads = args.num_k_heads = args.num_v_heads = 1;
    args.head_dim = D;
    args.scale = 1.0f;
    args.total_tokens = T;
    args.num_seqs = 1;
    args.q = pointer(cuda.upload(q));
    args.k = pointer(cuda.upload(k));
    args.v = pointer(cuda.upload(v));
    args.o = pointer(d_o);
    args.alpha = pointer(cuda.upload(alpha));
    args.beta = pointer(cuda.upload(beta));
    args.initial_state = pointer(cuda.upload(zeros));
    args.final_state = pointer(d_state);
    args.cu_seqlens = pointer(cuda.upload(cu_seqlens));
    ks.check(ks.kseal_gdn_prefill_workspace_size(prefill, &args, &args.workspace_bytes));
    args.workspace = pointer(cuda.upload(Bytes(args.workspace_bytes)));

    // 7. Run: validates and launches on args.stream (here the default one), nothing else. Then wait, as with any launch.
    ks.check(ks.kseal_gdn_prefill_run(prefill, &args));
    cuda.call("cuCtxSynchronize");

    // 8. The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both.
    const auto out = cuda.download<Bf16>(d_o, T * D);
    const auto state = cuda.download<float>(d_state, D * D);
    for (int i = 0; i < D; i++) {
        expect("o of token 0", from_bf16(out[i]), 1.0f);
        expect("o of token 1", from_bf16(out[D + i]), 0.75f);
        expect("column 0 of the state", state[i * D], 0.5f);
        expect("column 1 of the state", state[i * D + 1], 0.25f);
        expect("column 2 of the state", state[i * D + 2], 0.0f);
    }

    // 9. Release in any order.
    ks.check(ks.kseal_gdn_prefill_release(prefill));
    ks.kseal_close(bundle);
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
