// The pipeline that all collectives of one host go through, piece by piece.
//
//   pack     copy what others need of a piece into my slot
//   reduce   allreduce only: my part over all members, into my tensor, and into my slot
//   unpack   copy, or reduce, what I need from the slots of the others, into my tensor
//
// A rank does whatever can be done, the oldest piece first: it may be as many pieces ahead of the
// slowest one as there are slots, and sleeps only when nothing can be done. It can be done when the
// peers have come so far:
//
//   reduce piece j   those who give have packed j
//   unpack piece j   those who give have reduced j (packed, where nothing is reduced between)
//   pack piece j     those who take have unpacked j - slots, so that nobody reads my slot any more
//
// They tell so by counters on their boards, one set for each peer, since the sets of ranks that
// work together differ. A rank that sleeps names the peer it waits for; only that one wakes it.
// The rank whose piece is the oldest of all can always go on, so no ranks can wait for each other.

#pragma once

#include <stdint.h>

#include "board.h"
#include "segment.h"

namespace {

constexpr int64_t kDone = 0, kWaiting = 1, kCounted = 2;

// `Steps` derives from it and has the steps; it may say who gives, and who takes.
template <class Steps>
class Pipeline {
 public:
  explicit Pipeline(Segment& segment)
      : work_(segment.work), progress_(segment.progress), boards_(segment.group) {}

  // Run until all is done, or a rank has not come in time: then a new pipeline goes on.
  int64_t go() {
    if (progress_.packed == 0 && self().gives(me()) && !boards_.nobody_reads()) return kWaiting;
    return run();
  }

  static constexpr bool kReducesBetween = false;
  bool gives(int64_t member) const { return true; }
  bool takes(int64_t member) const { return true; }
  void reduce(int64_t piece) {}

 protected:
  const Work& work_;
  Progress& progress_;
  const Boards boards_;

  int64_t members() const { return boards_.members(); }
  int64_t me() const { return boards_.me(); }

  int64_t run() {
    while (progress_.unpacked < progress_.pieces) {
      bool unpacked = try_unpack(), reduced = try_reduce(), packed = try_pack();
      if (!unpacked && !reduced && !packed && !wait_for_the_oldest()) return kWaiting;
    }
    boards_.finish(progress_.pieces);
    return kDone;
  }

  void pack_next() {
    self().pack(progress_.packed++);
    if (!Steps::kReducesBetween) progress_.reduced = progress_.packed;
    if (self().gives(me())) boards_.tell(&Counters::packed, progress_.packed);
  }

 private:
  static constexpr Counter kGiven =
      Steps::kReducesBetween ? &Counters::reduced : &Counters::packed;

  Steps& self() { return static_cast<Steps&>(*this); }
  const Steps& self() const { return static_cast<const Steps&>(*this); }

  // A member that must come to `pieces` and has not yet; -1: all have.
  int64_t behind(Counter counter, int64_t pieces) const {
    bool freeing = counter == &Counters::unpacked;
    if (pieces <= 0 || !(freeing ? self().gives(me()) : self().takes(me()))) return -1;
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && (freeing ? self().takes(m) : self().gives(m)) &&
          !boards_.has_come(m, counter, pieces))
        return m;
    return -1;
  }

  bool try_unpack() {
    if (progress_.unpacked == progress_.reduced || behind(kGiven, progress_.unpacked + 1) >= 0)
      return false;
    self().unpack(progress_.unpacked++);
    if (self().takes(me()) || progress_.unpacked == progress_.pieces)
      boards_.tell(&Counters::unpacked, progress_.unpacked);
    return true;
  }

  bool try_reduce() {
    if (progress_.reduced == progress_.packed ||
        behind(&Counters::packed, progress_.reduced + 1) >= 0)
      return false;
    self().reduce(progress_.reduced++);
    boards_.tell(&Counters::reduced, progress_.reduced);
    return true;
  }

  bool try_pack() {
    if (progress_.packed == progress_.pieces ||
        progress_.packed == progress_.unpacked + boards_.slots() ||
        behind(&Counters::unpacked, progress_.packed + 1 - boards_.slots()) >= 0)
      return false;
    pack_next();
    return true;
  }

  bool wait_for_the_oldest() const {
    if (progress_.unpacked < progress_.reduced) return wait(kGiven, progress_.unpacked + 1);
    if (progress_.reduced < progress_.packed) return wait(&Counters::packed, progress_.reduced + 1);
    return wait(&Counters::unpacked, progress_.packed + 1 - boards_.slots());
  }

  bool wait(Counter counter, int64_t pieces) const {
    int64_t member = behind(counter, pieces);
    return member < 0 || boards_.wait(member, counter, pieces);
  }
};

}  // namespace
