// Claiming, reporting and waiting of the thread team (see thread_pool.hpp).
// Must not know: what the items are.
#include "thread_pool.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace tokenwire {
namespace {

// The team's account is bounded above, so that old gains do not hide a change; below it, the caller goes alone.
constexpr double kMostGain = 1e-3, kMostLoss = 1e-3;
constexpr double kShortestPenalty = 5e-3, kLongestPenalty = 160e-3;
// A gain after which earlier losses are forgotten.
constexpr double kForgiven = 20e-3;
// One thread alone has the memory for itself: it needs less than the sum of what the threads need.
constexpr double kAloneFaster = 0.8;

void sleep_while_equal(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

uint64_t pack(uint32_t begin, uint32_t end) { return static_cast<uint64_t>(end) << 32 | begin; }

}  // namespace

ThreadPool::ThreadPool(int threads, int spin)
    : threads_(threads), spin_(spin), ranges_(std::make_unique<Range[]>(threads)), penalty_(kShortestPenalty) {
    for (int i = 1; i < threads_; ++i) helpers_.emplace_back([this, i] { help(i); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    phase_.fetch_add(1);
    wake_all(phase_);
    for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::publish(int items, int grain, Task task, void* work) {
    task_ = task;
    work_ = work;
    items_ = items;
    grain_ = std::max(1, grain);
    done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < threads_; ++i) {
        const uint32_t begin = static_cast<uint32_t>(static_cast<int64_t>(items) * i / threads_);
        const uint32_t end = static_cast<uint32_t>(static_cast<int64_t>(items) * (i + 1) / threads_);
        ranges_[i].bounds.store(pack(begin, end), std::memory_order_release);
    }
    phase_.fetch_add(1);
    if (sleepers_.load() > 0) wake_all(phase_);
}

// A quarter of what is left at a time: long runs first, small ones to even out the end. Bounds that were
// read in an earlier phase do no harm: a successful exchange proves that they are the bounds of this one.
bool ThreadPool::claim(int victim, bool own, Claim& taken) {
    std::atomic<uint64_t>& bounds = ranges_[victim].bounds;
    uint64_t old = bounds.load(std::memory_order_acquire);
    for (;;) {
        const uint32_t first = static_cast<uint32_t>(old), last = static_cast<uint32_t>(old >> 32);
        if (first >= last) return false;
        const uint32_t count = std::clamp<uint32_t>((last - first) / 4, 1, own ? 1 << 30 : 8);
        const uint64_t rest = own ? pack(first + count, last) : pack(first, last - count);
        if (!bounds.compare_exchange_weak(old, rest, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        taken.begin = static_cast<int>(own ? first : last - count);
        taken.end = taken.begin + static_cast<int>(count);
        taken.next = own ? static_cast<int>(last) : taken.end;
        return true;
    }
}

void ThreadPool::execute(int thread, const Claim& taken) {
    for (int first = taken.begin; first < taken.end; first += grain_) {
        task_(work_, thread, first, std::min(taken.end, first + grain_), taken.next);
    }
}

// Returns the number of items done.
int ThreadPool::take_part(int thread) {
    int finished = 0;
    for (int i = 0; i < threads_; ++i) {
        const int victim = (thread + i) % threads_;
        Claim taken;
        while (claim(victim, i == 0, taken)) {
            execute(thread, taken);
            finished += taken.end - taken.begin;
        }
    }
    if (finished > 0) report(finished);
    return finished;
}

void ThreadPool::report(int count) {
    const uint32_t total = static_cast<uint32_t>(items_);
    const uint32_t before = done_.fetch_add(static_cast<uint32_t>(count));
    if (before + static_cast<uint32_t>(count) == total && caller_sleeps_.load()) wake_all(done_);
}

// Also marks the beginning of a phase.
bool ThreadPool::alone() {
    phase_start_ = Clock::now();
    return phase_start_ < alone_until_;
}

bool ThreadPool::spin_for_items() const {
    const uint32_t total = static_cast<uint32_t>(items_);
    for (int i = 0; i < spin_; ++i) {
        if (done_.load(std::memory_order_acquire) == total) return true;
        pause_briefly();
    }
    return false;
}

void ThreadPool::sleep_for_items() {
    const uint32_t total = static_cast<uint32_t>(items_);
    caller_sleeps_.store(true);
    for (uint32_t done = done_.load(); done != total; done = done_.load()) sleep_while_equal(done_, done);
    caller_sleeps_.store(false);
}

// Compares the phase with what the caller, at the speed of its `own` items, would have needed for all.
void ThreadPool::judge(int own, Clock::time_point worked) {
    const Clock::time_point end = Clock::now();
    const Seconds one_thread = kAloneFaster * (worked - phase_start_) * items_ / std::max(own, 1);
    const Seconds gain = one_thread - (end - phase_start_);
    gain_ = std::min(gain_ + gain, Seconds(kMostGain));
    earned_ += gain;
    if (earned_.count() > kForgiven) penalty_ = Seconds(kShortestPenalty);
    if (gain_.count() > -kMostLoss) return;
    alone_until_ = end + std::chrono::duration_cast<Clock::duration>(penalty_);
    penalty_ = std::min(2 * penalty_, Seconds(kLongestPenalty));
    gain_ = earned_ = Seconds(0);
}

uint32_t ThreadPool::wait_for_phase(uint32_t seen) {
    for (int i = 0; i < spin_; ++i) {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (phase != seen) return phase;
        pause_briefly();
    }
    sleepers_.fetch_add(1);
    while (phase_.load() == seen) sleep_while_equal(phase_, seen);
    sleepers_.fetch_sub(1);
    return phase_.load();
}

void ThreadPool::help(int thread) {
    uint32_t seen = 0;
    while (!stopping_.load()) {
        seen = wait_for_phase(seen);
        take_part(thread);
    }
}

}  // namespace tokenwire
