// The boards, on which the ranks of a host tell each other their progress, and sleep until it comes.

#pragma once

#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "segment.h"
#include "slot_stores.h"

namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line: what one rank writes is its own

// The progress of one rank as one of its peers sees it, in pieces since the job began.
struct Counters {
  uint64_t packed, reduced, unpacked;
  uint32_t read_ns[kTimedSlots];  // by slot of the peer: how long I have read the piece there
  char rest[kLine - 24 - 4 * kTimedSlots];
};

using Counter = uint64_t Counters::*;

// What a rank writes and its peers read, at the start of its memory.
struct Board {
  uint32_t waits_for;   // local number of a peer, plus 1: that one must wake me
  uint32_t counter;     // when this counter, an offset in `Counters`,
  uint64_t wanted;      // has come to this
  char rest[kLine - 16];
  Counters told[];  // by the peer's local number
};

class Boards {
 public:
  explicit Boards(Group& group) : group_(group) {}

  int64_t members() const { return group_.members; }
  int64_t me() const { return group_.index; }
  int64_t slots() const { return group_.slots; }
  int64_t slot_bytes() const { return group_.slot_bytes; }

  char* slot(int64_t member, int64_t piece) const {
    return memory(member) + group_.slots_start + piece % group_.slots * group_.slot_bytes;
  }

  // A number for each member, which its owner tells with its first piece.
  int64_t* row(int64_t member) const { return (int64_t*)(memory(member) + group_.row_start); }

  bool has_come(int64_t member, Counter counter, int64_t pieces) const {
    int64_t local = group_.local[member];
    return load(&(told_by(local)->*counter)) >= group_.base[local] + uint64_t(pieces);
  }

  void write(Counter counter, int64_t pieces) const {
    Board* mine = board(group_.own);
    for (int64_t m = 0; m < members(); ++m) {
      int64_t local = group_.local[m];
      if (m != me())
        __atomic_store_n(&(mine->told[local].*counter), group_.base[local] + uint64_t(pieces),
                         __ATOMIC_RELEASE);
    }
  }

  // Tell a member how long I have read what it put into a slot, or how much longer than told before.
  void tell_time(int64_t member, int64_t slot, int64_t ns, bool longer) const {
    uint32_t* told = &board(group_.own)->told[group_.local[member]].read_ns[slot];
    if (longer) ns += __atomic_load_n(told, __ATOMIC_RELAXED);
    __atomic_store_n(told, uint32_t(ns < UINT32_MAX ? ns : UINT32_MAX), __ATOMIC_RELAXED);
  }

  // How long a member has read my slot: known when it has told that its piece is unpacked.
  int64_t time_of(int64_t member, int64_t slot) const {
    return __atomic_load_n(&told_by(group_.local[member])->read_ns[slot], __ATOMIC_RELAXED);
  }

  void tell(Counter counter, int64_t pieces) const {
    write(counter, pieces);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // before looking who sleeps: see `sleep`
    for (int64_t m = 0; m < members(); ++m) {
      if (m == me()) continue;
      Board* theirs = board(group_.local[m]);
      uint32_t name = uint32_t(group_.own + 1);
      // What the acquired number does not show is of a later sleep, which looks again.
      if (__atomic_load_n(&theirs->waits_for, __ATOMIC_ACQUIRE) == name &&
          __atomic_load_n(&theirs->counter, __ATOMIC_RELAXED) == offset(counter) &&
          __atomic_load_n(&theirs->wanted, __ATOMIC_RELAXED) <=
              group_.base[group_.local[m]] + uint64_t(pieces) &&
          __atomic_compare_exchange_n(&theirs->waits_for, &name, 0, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_RELAXED))
        syscall(SYS_futex, &theirs->waits_for, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
  }

  bool wait(int64_t member, Counter counter, int64_t pieces) const {
    int64_t local = group_.local[member];
    return wait_for(local, counter, group_.base[local] + uint64_t(pieces));
  }

  // Whether all ranks of the host have ended what they did together with me before.
  bool nobody_reads() const {
    for (int64_t local = 0; local < group_.local_size; ++local)
      if (group_.base[local] > 0 && !wait_for(local, &Counters::unpacked, group_.base[local]))
        return false;
    return true;
  }

  // Count a segment of so many pieces among what we have done together.
  void finish(int64_t pieces) const {
    for (int64_t m = 0; m < members(); ++m)
      if (m != me()) group_.base[group_.local[m]] += uint64_t(pieces);
  }

 private:
  Group& group_;

  static uint64_t load(const uint64_t* counter) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  }

  static uint32_t offset(Counter counter) {
    return counter == &Counters::packed    ? offsetof(Counters, packed)
           : counter == &Counters::reduced ? offsetof(Counters, reduced)
                                           : offsetof(Counters, unpacked);
  }

  char* memory(int64_t member) const { return group_.memory[group_.local[member]]; }
  Board* board(int64_t local) const { return (Board*)group_.memory[local]; }
  const Counters* told_by(int64_t local) const { return &board(local)->told[group_.own]; }

  bool wait_for(int64_t local, Counter counter, uint64_t wanted) const {
    if (sleep(local, counter, wanted)) return true;
    group_.missed = local;
    return false;
  }

  // Sleep until `local` has come to `wanted`. False when it has not come in time.
  bool sleep(int64_t local, Counter counter, uint64_t wanted) const {
    Board* mine = board(group_.own);
    const uint64_t* seen = &(told_by(local)->*counter);
    uint32_t name = uint32_t(local + 1);
    timespec limit = {time_t(group_.timeout_ns / 1000000000), long(group_.timeout_ns % 1000000000)};
    bool in_time = true;
    __atomic_store_n(&mine->counter, offset(counter), __ATOMIC_RELAXED);
    __atomic_store_n(&mine->wanted, wanted, __ATOMIC_RELAXED);
    while (load(seen) < wanted && in_time) {
      __atomic_store_n(&mine->waits_for, name, __ATOMIC_RELEASE);
      __atomic_thread_fence(__ATOMIC_SEQ_CST);  // before looking again: see `tell`
      if (load(seen) < wanted) {
        long slept = syscall(SYS_futex, &mine->waits_for, FUTEX_WAIT, name, &limit, nullptr, 0);
        // A signal looks like the end of the time: the caller looks around, and comes back.
        in_time = slept == 0 || __atomic_load_n(&mine->waits_for, __ATOMIC_RELAXED) != name;
      }
      __atomic_store_n(&mine->waits_for, 0, __ATOMIC_RELAXED);
    }
    return load(seen) >= wanted;
  }
};

}  // namespace
