// How long a fresh process takes to its first correct result, part by part: cold BUNDLE prints one JSON document, in milliseconds.

#include "common.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>

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

void measure(const std::string &folder) {
    Clock clock;
    Cuda cuda;
    cuda.use(0);
    const double context = clock.lap();
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);
    const double open = clock.lap();
    const Gdn prefill = prepare(bundle, 0);
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
        if (argc != 2)
            fail("usage: cold BUNDLE");
        measure(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
