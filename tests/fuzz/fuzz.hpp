// What every target needs.
#pragma once

#include <cstdio>
#include <cstdlib>

constexpr unsigned long long kPage = 4096;

inline void require(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "broken: %s\n", what);
  abort();
}
