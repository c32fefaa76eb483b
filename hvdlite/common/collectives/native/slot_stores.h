// How a rank stores into its own slots: plainly, or streaming past its caches.
//
// What is stored plainly waits in the cache of its core. A reader whose core shares that cache finds
// it there; one on another socket fetches it line by line, which takes several times as long as to
// read from memory what was streamed. Nobody says where cores lie, and processes move between them.
// So each rank tries both ways now and then, and compares how long it stores a piece and its slowest
// peer reads it, which peers write beside their counters.

#pragma once

#include <stdint.h>
#include <time.h>

#include "copies.h"

namespace {

constexpr int64_t kTimedSlots = 8;   // at most; with more slots, all pieces are plain
constexpr int64_t kUntimed = -1;     // what no piece takes
enum Stores : int64_t { kMeasured, kAllPlain, kAllStreamed };  // as in collectives.py

// What a rank keeps from call to call for one group and one collective; zero at first.
struct SlotStores {
  int64_t stores;     // one of `Stores`
  int64_t chosen;     // whether pieces are streamed, but for those of a trial
  int64_t rounds;     // how often the slots have been filled
  int64_t streamed;   // bit by slot: the piece in it was streamed
  int64_t least[2];   // nanoseconds of a piece in this trial: plain, streamed
  int64_t own[kTimedSlots];  // by slot: nanoseconds to store its piece, or kUntimed

  // A trial: in five rounds, one slot is filled the other way, and the next one the chosen way. The
  // first round does not count: a slot is as the way before has left it. Members take turns, so that
  // one of them at a time changes its way.
  static constexpr int64_t kTried = 1, kCompared = 2;  // slots
  static constexpr int64_t kTrialRounds = 5, kTurnRounds = 8;
  static constexpr int64_t kPeriodRounds = 256;  // five pieces of 2048 go the worse way, with 8 slots

  // Return whether the next piece of `slot` is streamed, where the member with number `turn` chooses
  // by trials. The last piece of this slot took `last_ns`.
  bool next(int64_t slot, int64_t turn, int64_t last_ns) {
    if (slot == kTried) ++rounds;
    int64_t start = turn * kTurnRounds % kPeriodRounds + 1;
    int64_t round = (rounds - start + kPeriodRounds) % kPeriodRounds;
    if (slot == kTried && round == 0) least[0] = least[1] = kUntimed;
    if ((slot == kTried || slot == kCompared) && 1 < round && round <= kTrialRounds)
      note(streamed >> slot & 1, last_ns);
    if (slot == kCompared && round == kTrialRounds) choose();
    bool streams = bool(chosen) != (slot == kTried && round < kTrialRounds);
    mark(slot, streams);
    return streams;
  }

  void mark(int64_t slot, bool streams) {
    streamed = (streamed & ~(int64_t(1) << slot)) | int64_t(streams) << slot;
  }

 private:
  void note(int64_t way, int64_t ns) {
    if (ns != kUntimed && (least[way] == kUntimed || ns < least[way])) least[way] = ns;
  }

  // One slot of eight misses the caches more cheaply than all would: a small gain is none.
  void choose() {
    if (least[0] != kUntimed && least[1] != kUntimed) chosen = 5 * least[1] < 4 * least[0];
  }
};

static_assert(sizeof(SlotStores) == 14 * 8, "collectives.py makes room for it");

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

}  // namespace
