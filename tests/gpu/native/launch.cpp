// What a run costs the host beside a bare launch of the same kernel with the same parameters, ready made.
//
//     launch BUNDLE [ROUNDS]
//
// Both sides take turns, A B B A; a round is 256 launches, and the device is waited for between rounds, so that neither side waits
// for the queue. Prints one JSON document: medians per launch in microseconds.

#include "common.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

namespace {

constexpr int LAUNCHES = 256, WARM_UP = 3;

struct LaunchConfig {
    unsigned grid[3], block[3], smem;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

// CUDA_KERNEL_NODE_PARAMS
struct NodeParams {
    void *function;
    unsigned grid[3], block[3], smem;
    void **params, **extra;
    void *kernel, *context;
};

// The launches that one run makes, taken from a graph that captured it.
class Bare {
  public:
    Bare(const Cuda &cuda, void *stream, const std::function<void()> &run) {
        void *graph = nullptr;
        cuda.call("cuStreamBeginCapture_v2", stream, 2);
        run();
        cuda.call("cuStreamEndCapture", stream, &graph);
        std::size_t count = 0;
        cuda.call("cuGraphGetNodes", graph, static_cast<void **>(nullptr), &count);
        std::vector<void *> nodes(count);
        cuda.call("cuGraphGetNodes", graph, nodes.data(), &count);
        for (void *node : nodes) {
            NodeParams made{};
            cuda.call("cuGraphKernelNodeGetParams_v2", node, &made);
            launches_.push_back({made, config(made, stream)});
        }
        // The graph stays: it holds the parameters.
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        launch_ = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernelEx"));
    }

    void operator()() const {
        for (const auto &one : launches_)
            if (int code = launch_(&one.config, one.node.function != nullptr ? one.node.function : one.node.kernel,
                                   one.node.params, nullptr);
                code != 0)
                fail("cuLaunchKernelEx: CUDA error " + std::to_string(code));
    }

    std::size_t count() const { return launches_.size(); }

  private:
    using Launch = int (*)(const LaunchConfig *, void *, void **, void **);
    struct One {
        NodeParams node;
        LaunchConfig config;
    };

    static LaunchConfig config(const NodeParams &node, void *stream) {
        LaunchConfig made{};
        std::copy_n(node.grid, 3, made.grid);
        std::copy_n(node.block, 3, made.block);
        made.smem = node.smem;
        made.stream = stream;
        return made;
    }

    std::vector<One> launches_;
    Launch launch_ = nullptr;
};

double microseconds(const Cuda &cuda, const std::function<void()> &launch) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < LAUNCHES; i++)
        launch();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
    cuda.call("cuCtxSynchronize");
    return took.count() / LAUNCHES;
}

double median(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

void compare(const Cuda &cuda, const char *op, void *stream, int rounds, const std::function<void()> &run, bool last) {
    const Bare bare(cuda, stream, run);
    const std::array<std::function<void()>, 2> sides = {run, [&] { bare(); }};
    std::array<std::vector<double>, 2> taken;
    for (int round = 0; round < WARM_UP + rounds; round++)
        for (std::size_t side : {0u, 1u, 1u, 0u}) {
            const double sample = microseconds(cuda, sides[side]);
            if (round >= WARM_UP)
                taken[side].push_back(sample);
        }
    const double ours = median(taken[0]), theirs = median(taken[1]);
    std::printf("  {\"op\": \"%s\", \"kernels\": %zu, \"run_us\": %.3f, \"bare_us\": %.3f, \"ratio\": %.3f}%s\n", op, bare.count(),
                ours, theirs, ours / theirs, last ? "" : ",");
}

// Two sequences of one page each, whatever is in it: only the launch counts.
class Decode {
  public:
    Decode(const Cuda &cuda, const kernseal::Bundle &bundle, void *stream)
        : decode_(prepare(bundle)), pages_(cuda, std::vector<std::uint16_t>(PAGES * PAGE * D)),
          rows_(cuda, std::vector<std::uint16_t>(B * GROUP * D)), table_(cuda, {0, 1, 2, 3}), lengths_(cuda, {16, 16}),
          args_(kernseal::XqaDecode::args()) {
        args_.num_kv_heads = 1;
        args_.num_q_heads = GROUP;
        args_.q_scale = 1.0f;
        args_.batch_size = B;
        args_.num_pages = PAGES;
        args_.max_pages_per_seq = 2;
        args_.stream = stream;
        args_.q = args_.o = rows_.get();
        args_.k = args_.v = pages_.get();
        args_.page_table = table_.get();
        args_.seq_lens = lengths_.get();
        args_.workspace_bytes = decode_.workspace_size(args_);
        args_.semaphores_bytes = decode_.semaphores_size(args_);
        scratch_.emplace_back(cuda, std::vector<unsigned char>(args_.workspace_bytes + 256));
        scratch_.emplace_back(cuda, std::vector<unsigned char>(args_.semaphores_bytes + 256));
        args_.workspace = scratch_[0].get();
        args_.semaphores = scratch_[1].get();
    }

    void run() const { decode_.run(args_); }

  private:
    static constexpr int B = 2, GROUP = 8, D = 128, PAGE = 16, PAGES = 4;
    using Handle = kernseal::Prepared<kernseal::XqaDecode>;

    static Handle prepare(const kernseal::Bundle &bundle) {
        auto config = kernseal::XqaDecode::config();
        config.device = -1;
        config.dtype = config.kv_dtype = config.out_dtype = KSEAL_DTYPE_BF16;
        config.head_dim = D;
        config.group_size = GROUP;
        config.page_size = PAGE;
        return bundle.prepare<kernseal::XqaDecode>(config);
    }

    Handle decode_;
    Memory<std::uint16_t> pages_, rows_;
    Memory<std::int32_t> table_, lengths_;
    std::vector<Memory<unsigned char>> scratch_;
    kseal_xqa_decode_args args_;
};

void measure(const std::string &folder, int rounds) {
    Cuda cuda;
    cuda.use(0);
    void *stream = nullptr;
    cuda.call("cuStreamCreate", &stream, 1u);
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);
    const Gdn prefill = ::prepare(bundle, 0);
    const Problem problem(cuda, prefill, 1.0f, stream);
    const Decode decode(cuda, bundle, stream);
    std::printf("{\"rounds\": %d, \"launches\": %d, \"rows\": [\n", rounds, LAUNCHES);
    compare(cuda, "gdn_prefill", stream, rounds, [&] { prefill.run(problem.args()); }, false);
    compare(cuda, "xqa_decode", stream, rounds, [&] { decode.run(); }, true);
    std::printf("]}\n");
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc < 2)
            fail("usage: launch BUNDLE [ROUNDS]");
        measure(argv[1], argc > 2 ? std::atoi(argv[2]) : 21);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
