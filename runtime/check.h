// Invariants and status plumbing. DIM0_CHECK is for what only a bug in this program can break; it
// prints the place and aborts. What users, files, peers or devices can get wrong is an
// absl::Status.
#ifndef DIM0_RUNTIME_CHECK_H_
#define DIM0_RUNTIME_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define DIM0_CHECK(condition)                                                                \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

#define DIM0_RETURN_IF_ERROR(expression)                                                \
  do {                                                                                  \
    if (absl::Status dim0_status = (expression); !dim0_status.ok()) return dim0_status; \
  } while (false)

#define DIM0_CONCAT_INNER(a, b) a##b
#define DIM0_CONCAT(a, b) DIM0_CONCAT_INNER(a, b)
#define DIM0_ASSIGN_OR_RETURN(target, expression) \
  DIM0_ASSIGN_OR_RETURN_IMPL(DIM0_CONCAT(dim0_statusor_, __LINE__), target, expression)
#define DIM0_ASSIGN_OR_RETURN_IMPL(holder, target, expression) \
  auto holder = (expression);                                  \
  if (!holder.ok()) return std::move(holder).status();         \
  target = *std::move(holder)

#endif  // DIM0_RUNTIME_CHECK_H_
