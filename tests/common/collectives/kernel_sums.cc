// Adds numbers as the kernel does, on a machine that has no Python; it loads the kernel's library, too.
//
// Arguments: the library, the name of the type, bytes of a member, bytes of an element, members,
// prescale, postscale. Stdin has the elements of each member in turn; stdout gets the sums.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "reducer.h"

int main(int count, char** words) {
  if (count != 8) return 2;
  void* library = dlopen(words[1], RTLD_NOW);
  if (library == nullptr || dlsym(library, "hvdlite_run") == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  std::string type = words[2];
  int64_t bytes = atol(words[3]), members = atol(words[5]), elements = bytes / atol(words[4]);
  std::string given(bytes * members, 0), sums(bytes, 0);
  if (fread(&given[0], 1, given.size(), stdin) != given.size()) return 3;
  std::vector<const char*> parts;
  for (int64_t member = 0; member < members; ++member) parts.push_back(&given[member * bytes]);
  auto reduce = type == "float32"   ? Reducer<Plain<float>, Sum>::reduce
                : type == "float64" ? Reducer<Plain<double>, Sum>::reduce
                : type == "float16" ? Reducer<Float16, Sum>::reduce
                                    : Reducer<Bfloat16, Sum>::reduce;
  reduce(members, atof(words[6]), atof(words[7]), parts.data(), elements, &sums[0], nullptr);
  fwrite(sums.data(), 1, sums.size(), stdout);
  return 0;
}
