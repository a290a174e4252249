// How long a fresh process takes to its first correct result, part by part, in milliseconds: one JSON document.
//
//     cold BUNDLE [model]
//
// `model` also prepares what one model needs besides: prefill into a pool of states, and decode of both kinds of attention.

#include "common.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

namespace {

class Clock {
  public:
    double lap() {
        const auto now = std::chrono::steady_clock::now();
        const std::chrono::duration<double, std::milli> took = now - last_;
        last_ = now;
        return took.count();
    }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// What gpu.cold.problem names for a model, but for the prefill that is run.
struct Others {
    kernseal::Prepared<kernseal::GdnPrefill> pooled;
    kernseal::Prepared<kernseal::GdnDecode> linear;
    kernseal::Prepared<kernseal::XqaDecode> full;

    explicit Others(const kernseal::Bundle &bundle)
        : pooled(bundle.prepare<kernseal::GdnPrefill>(pooled_config())), linear(bundle.prepare<kernseal::GdnDecode>(linear_config())),
          full(bundle.prepare<kernseal::XqaDecode>(full_config())) {}

  private:
    static kseal_gdn_prefill_config pooled_config() {
        auto config = gdn_config(0);
        config.state_dtype = KSEAL_DTYPE_BF16;
        config.pooled = 1;
        return config;
    }

    static kseal_gdn_decode_config linear_config() {
        auto config = kernseal::GdnDecode::config();
        config.device = 0;
        config.tokens = 1;
        config.index_dtype = KSEAL_DTYPE_I32;
        config.qk_l2norm = config.update_state = 1;
        config.wide = 0;
        config.tile_v = 16;
        return config;
    }

    static kseal_xqa_decode_config full_config() {
        auto config = kernseal::XqaDecode::config();
        config.device = 0;
        config.dtype = config.kv_dtype = config.out_dtype = KSEAL_DTYPE_BF16;
        config.head_dim = 128;
        config.group_size = 8;
        config.page_size = 16;
        return config;
    }
};

void measure(const std::string &folder, bool model) {
    Clock clock;
    Cuda cuda;
    cuda.use(0);
    const double context = clock.lap();
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);
    const double open = clock.lap();
    const Gdn prefill = prepare(bundle, 0);
    std::optional<Others> others;
    if (model)
        others.emplace(bundle);
    const double prepare = clock.lap();
    const Problem problem(cuda, prefill, 1.0f, nullptr);
    const double memory = clock.lap();
    prefill.run(problem.args());
    const float moved = problem.state()[0]; // waits
    const double first = clock.lap();
    if (std::fabs(moved - 1.0f / 8192) > 1e-7f)
        fail("the state moved by " + std::to_string(moved) + ", expected 1/8192");
    std::printf("{\"context_ms\": %.3f, \"open_ms\": %.3f, \"prepare_ms\": %.3f, \"memory_ms\": %.3f, \"first_run_ms\": %.3f}\n",
                context, open, prepare, memory, first);
    std::fflush(stdout); // what is timed ends here, not after the destructors
}

} // namespace

int main(int argc, char **argv) {
    try {
        const bool model = argc == 3 && std::strcmp(argv[2], "model") == 0;
        if (argc != 2 && !model)
            fail("usage: cold BUNDLE [model]");
        measure(argv[1], model);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
