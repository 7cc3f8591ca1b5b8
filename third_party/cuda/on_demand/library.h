// Shared libraries loaded when a function of theirs is first called. cuBLASLt and NCCL take a tenth
// of a second and 200 MB of memory to load, which programs that run on a CPU would pay at each
// start; so programs are linked with functions of the same names that pass calls
// on.
#ifndef DIM0_THIRD_PARTY_CUDA_ON_DEMAND_LIBRARY_H_
#define DIM0_THIRD_PARTY_CUDA_ON_DEMAND_LIBRARY_H_

#include <dlfcn.h>

#include <string>
#include <type_traits>

namespace dim0::on_demand {

class Library {
 public:
  // `file`: the name by which the dynamic linker finds it, in the program's own run path, too.
  explicit Library(const char* file) : handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) error_ = dlerror();
  }

  // Null if the library, or the function in it, is missing: error() says which.
  template <typename Function>
  Function* Find(const char* name) {
    if (handle_ == nullptr) return nullptr;
    void* const found = dlsym(handle_, name);
    if (found == nullptr) error_ = std::string(name) + " is not in the library that was loaded";
    return reinterpret_cast<Function*>(found);
  }

  const char* error() const { return error_.c_str(); }

 private:
  void* const handle_;
  std::string error_;
};

}  // namespace dim0::on_demand

// Defines `function`, which has the parameters and passes on the arguments, each list in
// parentheses; `otherwise` is what it returns where LoadedLibrary() has no such function.
#define DIM0_ON_DEMAND(result, function, otherwise, parameters, arguments)    \
  result function parameters {                                                \
    using Function = std::remove_pointer_t<decltype(&function)>;              \
    static Function* const found = LoadedLibrary().Find<Function>(#function); \
    return found == nullptr ? otherwise : found arguments;                    \
  }

#endif  // DIM0_THIRD_PARTY_CUDA_ON_DEMAND_LIBRARY_H_
