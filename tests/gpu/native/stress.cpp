// Threads with streams of their own launch one op at once, half of them through a handle that all share, half through their own.
// Every stream's state must be, bit for bit, what the same number of launches gives alone.
//
//     stress BUNDLE [LAUNCHES [THREADS [STREAMS]]]

#include "common.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace {

struct Size {
    int launches, threads, streams;
};

float value_of(int stream) { return 1.0f + static_cast<float>(stream) / 64; }

// What `launches` launches give, one after the other with nothing beside them.
std::vector<float> alone(const Cuda &cuda, const Gdn &prefill, float value, int launches) {
    const Problem problem(cuda, prefill, value, nullptr);
    for (int i = 0; i < launches; i++)
        prefill.run(problem.args());
    cuda.call("cuCtxSynchronize");
    return problem.state();
}

class Worker {
  public:
    Worker(Cuda &cuda, const kernseal::Bundle &bundle, const Gdn &shared, const Size &size, int index)
        : cuda_(cuda), bundle_(bundle), shared_(shared), size_(size), index_(index) {}

    void operator()() {
        cuda_.use(0);
        std::optional<Gdn> own;
        if (index_ % 2 != 0)
            own.emplace(prepare(bundle_, 0));
        const Gdn &prefill = own ? *own : shared_;
        for (int s = 0; s < size_.streams; s++) {
            void *stream = nullptr;
            cuda_.call("cuStreamCreate", &stream, 0u);
            problems_.push_back(std::make_unique<Problem>(cuda_, prefill, value_of(index_ * size_.streams + s), stream));
        }
        for (int i = 0; i < size_.launches; i++)
            for (const auto &problem : problems_)
                prefill.run(problem->args());
        for (const auto &problem : problems_)
            cuda_.call("cuStreamSynchronize", problem->args().stream);
    }

    void check(const Gdn &prefill) const {
        for (int s = 0; s < size_.streams; s++) {
            const int stream = index_ * size_.streams + s;
            if (problems_[static_cast<std::size_t>(s)]->state() != alone(cuda_, prefill, value_of(stream), size_.launches))
                fail("stream " + std::to_string(stream) + ": its state is not that of launches one by one");
        }
    }

  private:
    Cuda &cuda_;
    const kernseal::Bundle &bundle_;
    const Gdn &shared_;
    Size size_;
    int index_;
    std::vector<std::unique_ptr<Problem>> problems_;
};

void run(const std::string &folder, const Size &size) {
    Cuda cuda;
    cuda.use(0);
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);
    const Gdn prefill = prepare(bundle, 0);
    if (alone(cuda, prefill, 1.0f, size.launches) == alone(cuda, prefill, 1.0f, size.launches - 1))
        fail("one launch more leaves the same state: this test would not see a lost launch");

    std::vector<Worker> workers;
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::string failure;
    for (int i = 0; i < size.threads; i++)
        workers.emplace_back(cuda, bundle, prefill, size, i);
    const auto began = std::chrono::steady_clock::now();
    for (Worker &worker : workers)
        threads.emplace_back([&] {
            try {
                worker();
            } catch (const std::exception &error) {
                const std::lock_guard<std::mutex> lock(mutex);
                failure = error.what();
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    if (!failure.empty())
        fail(failure);
    for (const Worker &worker : workers)
        worker.check(prefill);
    std::printf("ok: %d threads x %d streams x %d launches, every state as alone (%.1f s)\n", size.threads, size.streams,
                size.launches, took.count());
}

} // namespace

int main(int argc, char **argv) {
    const auto number = [&](int index, int otherwise) { return argc > index ? std::atoi(argv[index]) : otherwise; };
    try {
        if (argc < 2)
            fail("usage: stress BUNDLE [LAUNCHES [THREADS [STREAMS]]]");
        run(argv[1], {number(2, 10000), number(3, 8), number(4, 4)});
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
