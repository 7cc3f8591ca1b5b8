// The page's own files, as the build puts them into the program: see BUILD.bazel.
#ifndef DIM0_TOOLS_PAGE_PAGE_FILES_H_
#define DIM0_TOOLS_PAGE_PAGE_FILES_H_

namespace dim0::page_files {

extern const char kHtml[];    // page.html, with @STYLE@, @DATA@ and @SCRIPT@ to be replaced
extern const char kCss[];     // page.css
extern const char kScript[];  // the .js files, one after the other

}  // namespace dim0::page_files

#endif  // DIM0_TOOLS_PAGE_PAGE_FILES_H_
