// A small team of threads for one caller: phases of independent items, with work stealing.
//
// Each phase gives every thread a contiguous run of items; who is done takes items from the end of another
// thread's run. A phase ends when all items are done, not when all threads have arrived: a helper that the
// operating system has put aside never holds up the phase unless it had already taken an item. Waiting
// spins for a short while and then sleeps (futex), so a busy neighbour on the core is not fought with. When a
// helper with an item in hand was put aside all the same, the caller works alone for some milliseconds, longer
// each time it happens again: on a crowded machine the team costs little more than one thread.
// Which thread computes an item never changes its result.
// Must not know: what the items are.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace tokenwire {

class ThreadPool {
public:
    // `threads` counts the caller; `spin` is how many pauses to wait before sleeping.
    ThreadPool(int threads, int spin);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_; }

    // Calls work(thread, begin, end, next) until items 0..items-1 are covered; at most `grain` items a call.
    // Items end..next-1 will probably go to the same thread, so their memory may be fetched ahead.
    // One item, or one thread, runs on the caller alone. Not re-entrant; one caller at a time.
    template <class Work>
    void run(int items, int grain, Work&& work) {
        if (items <= 1 || threads_ == 1 || alone()) {
            if (items > 0) work(0, 0, items, items);
            return;
        }
        publish(items, grain, &call<std::remove_reference_t<Work>>, &work);
        take_part(0);
        spin_for_items() ? note_good_phase() : sleep_for_items();
    }

private:
    using Task = void (*)(void* work, int thread, int begin, int end, int next);

    struct Claim {
        int begin, end, next;
    };

    // The items a thread has not begun: begin in the low half, end in the high half.
    struct alignas(64) Range {
        std::atomic<uint64_t> bounds{0};
    };

    template <class Work>
    static void call(void* work, int thread, int begin, int end, int next) {
        (*static_cast<Work*>(work))(thread, begin, end, next);
    }

    void publish(int items, int grain, Task task, void* work);
    void take_part(int thread);
    bool claim(int victim, bool own, Claim& taken);
    void execute(int thread, const Claim& taken);
    void report(int count);
    bool alone();
    bool spin_for_items() const;
    void sleep_for_items();
    void note_good_phase();
    void judge_wait(std::chrono::steady_clock::time_point since);
    void help(int thread);
    uint32_t wait_for_phase(uint32_t seen);

    const int threads_;
    const int spin_;
    // Written by the caller between phases; read by a thread only after it has claimed an item.
    Task task_ = nullptr;
    void* work_ = nullptr;
    int items_ = 0;
    int grain_ = 1;
    std::unique_ptr<Range[]> ranges_;
    // The caller's own: when the phase began, until when it works alone, and how long it will the next time.
    std::chrono::steady_clock::time_point phase_start_{}, alone_until_{};
    std::chrono::microseconds penalty_;
    int good_phases_ = 0;
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::vector<std::thread> helpers_;
};

}  // namespace tokenwire
