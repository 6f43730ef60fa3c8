// A small team of threads for one caller: phases of independent items, with work stealing.
//
// Each phase gives every thread a contiguous run of items; who is done takes items from the end of another
// thread's run. A phase ends when all items are done, not when all threads have arrived: a helper that the
// operating system has put aside never holds up the phase unless it had already taken an item. Waiting
// spins for a short while and then sleeps (futex), so a busy neighbour on the core is not fought with. The caller
// keeps account of what the team gains over one thread; when helpers with items in hand are put aside so often
// that it loses, it works alone for some milliseconds, longer each time: on a crowded machine the team costs
// little more than one thread.
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
        const int own = take_part(0);
        const Clock::time_point worked = Clock::now();
        if (!spin_for_items()) sleep_for_items();
        judge(own, worked);
    }

private:
    using Clock = std::chrono::steady_clock;
    using Seconds = std::chrono::duration<double>;
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
    int take_part(int thread);
    bool claim(int victim, bool own, Claim& taken);
    void execute(int thread, const Claim& taken);
    void report(int count);
    bool alone();
    bool spin_for_items() const;
    void sleep_for_items();
    void judge(int own, Clock::time_point worked);
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
    // The caller's own account: when the phase began, what the team gained of late and since it last lost, until
    // when to work alone, and for how long the next time.
    Clock::time_point phase_start_{}, alone_until_{};
    Seconds gain_{0}, earned_{0}, penalty_;
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::vector<std::thread> helpers_;
};

}  // namespace tokenwire
