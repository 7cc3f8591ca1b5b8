#include "tests/simt/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "tests/simt/block.h"

namespace dim0::simt {
namespace {

struct Symbol {
  std::string name;  // mangled
  uint64_t value;
  uint64_t size;
};

struct Table {
  std::map<uint64_t, Symbol> functions;  // by value
  std::vector<Symbol> shared;            // thread-local statics of functions in dim0
  uint64_t dynamic_shared = 0;           // the thread-local offset of dynamic_shared_memory
  uint64_t load_address = 0;
};

void Read(const char* file, size_t size, Table& table) {
  const auto at = [&](uint64_t offset, uint64_t bytes) -> const char* {
    return offset <= size && bytes <= size - offset ? file + offset : nullptr;
  };
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(at(0, sizeof(Elf64_Ehdr)));
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(
      at(header->e_shoff, header->e_shnum * sizeof(Elf64_Shdr)));
  if (!sections) return;
  for (int i = 0; i < header->e_shnum; ++i) {
    const Elf64_Shdr& section = sections[i];
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= header->e_shnum) continue;
    const Elf64_Shdr& strings = sections[section.sh_link];
    const auto* symbols =
        reinterpret_cast<const Elf64_Sym*>(at(section.sh_offset, section.sh_size));
    const char* names = at(strings.sh_offset, strings.sh_size);
    if (!symbols || !names) continue;
    for (size_t k = 0; k < section.sh_size / sizeof(Elf64_Sym); ++k) {
      const Elf64_Sym& symbol = symbols[k];
      if (symbol.st_name >= strings.sh_size || symbol.st_shndx == SHN_UNDEF) continue;
      const std::string_view name = names + symbol.st_name;
      const int type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_FUNC) {
        table.functions[symbol.st_value] = {std::string(name), symbol.st_value, symbol.st_size};
      } else if (type == STT_TLS && name.starts_with("_ZZN4dim0")) {
        table.shared.push_back({std::string(name), symbol.st_value, symbol.st_size});
      } else if (type == STT_TLS && name == "_ZN4dim04cuda21dynamic_shared_memoryE") {
        table.dynamic_shared = symbol.st_value;
      }
    }
  }
}

const Table& GetTable() {
  static const Table& table = *[] {
    auto* table = new Table;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
          static_cast<Table*>(data)->load_address = info->dlpi_addr;
          return 1;  // the first is the program
        },
        table);
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0) {
      void* bytes = mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
      if (bytes != MAP_FAILED) {
        Read(static_cast<const char*>(bytes), status.st_size, *table);
        munmap(bytes, status.st_size);
      }
    }
    if (file >= 0) close(file);
    return table;
  }();
  return table;
}

}  // namespace

std::string FunctionName(const void* address) {
  const Table& table = GetTable();
  const uint64_t value = reinterpret_cast<uint64_t>(address) - table.load_address;
  auto next = table.functions.upper_bound(value);
  if (next != table.functions.begin()) {
    const Symbol& symbol = std::prev(next)->second;
    if (value < symbol.value + std::max<uint64_t>(symbol.size, 1)) {
      const std::unique_ptr<char, void (*)(void*)> demangled(
          abi::__cxa_demangle(symbol.name.c_str(), nullptr, nullptr, nullptr), std::free);
      std::string name = demangled ? demangled.get() : symbol.name;
      // Leave out the parameters, the last pair of parentheses, and a template's result type.
      int depth = 0;
      for (size_t i = name.size(); i-- > 0;) {
        if (name[i] == ')') ++depth;
        if (name[i] == '(' && --depth == 0) {
          name.resize(i);
          break;
        }
      }
      if (name.starts_with("void ")) name.erase(0, 5);
      return name;
    }
  }
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::vector<std::span<unsigned char>> StaticSharedMemory() {
  const Table& table = GetTable();
  std::vector<std::span<unsigned char>> memory;
  if (table.dynamic_shared == 0) return memory;
  // The program's thread-local variables keep their distances in every thread.
  unsigned char* start = DynamicSharedMemoryStart() - table.dynamic_shared;
  for (const Symbol& symbol : table.shared) memory.push_back({start + symbol.value, symbol.size});
  return memory;
}

}  // namespace dim0::simt
