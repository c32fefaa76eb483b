// Fills slots as one member does, where a piece takes as long as it is told, and says how.
//
// Arguments: the number of the member, then for each stage: rounds, nanoseconds of a plain piece, and
// of a streamed one (-1: not timed). Prints a line for each round: 1 for a streamed piece, 0 for a
// plain one, slot by slot.

#include "slot_stores.h"

#include <stdio.h>
#include <stdlib.h>

int main(int count, char** words) {
  SlotStores stores{};
  bool streamed[kTimedSlots];
  int64_t turn = atol(words[1]), rounds = 0;
  for (int stage = 2; stage + 2 < count; stage += 3) {
    int64_t ns[] = {atol(words[stage + 1]), atol(words[stage + 2])};
    for (int64_t round = atol(words[stage]); round > 0; --round, ++rounds) {
      for (int64_t slot = 0; slot < kTimedSlots; ++slot) {
        int64_t last = rounds == 0 ? kUntimed : ns[streamed[slot]];
        streamed[slot] = stores.next(slot, turn, last);
        putchar('0' + streamed[slot]);
      }
      putchar('\n');
    }
  }
  return 0;
}
