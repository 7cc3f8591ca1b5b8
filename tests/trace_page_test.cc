// The page of trace_report, opened in headless Chromium: what it shows, and that it answers to the
// pointer and the keys.
#include "tools/page/trace_page.h"

#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "httplib.h"
#include "nlohmann/json.hpp"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

// The first of `names` that is a program on PATH; "" if none is.
std::string FindProgram(const std::vector<std::string>& names) {
  const char* path = getenv("PATH");
  for (const std::string& name : names) {
    for (absl::string_view folder : absl::StrSplit(path != nullptr ? path : "", ':')) {
      const std::string file = absl::StrCat(folder, "/", name);
      if (::access(file.c_str(), X_OK) == 0) return file;
    }
  }
  return "";
}

// Calls `done` until it returns true, for 30 seconds at most.
template <typename Done>
bool WaitUntil(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < deadline) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

// A headless Chromium, driven over WebDriver (https://www.w3.org/TR/webdriver2/) by a chromedriver
// that this object runs.
class Browser {
 public:
  // `folder`: an existing one, for the profile and what the programs print.
  Browser(const std::string& driver, const std::string& chromium, const std::string& folder)
      : driver_(driver, {"--port=0"}, folder) {
    int port = 0;
    const bool started = WaitUntil([&] {
      const std::string said = Slurp(folder + "/out");
      const std::vector<std::string> parts =
          absl::StrSplit(said, absl::MaxSplits("successfully on port ", 1));
      return parts.size() == 2 && absl::StrContains(parts[1], ".") &&
             absl::SimpleAtoi(parts[1].substr(0, parts[1].find('.')), &port);
    });
    if (!started) {
      ADD_FAILURE() << "chromedriver did not start: " << Slurp(folder + "/err");
      return;
    }
    client_ = std::make_unique<httplib::Client>("127.0.0.1", port);
    client_->set_read_timeout(60);
    // No sandbox of its own: root and build sandboxes cannot nest one, and the page is ours.
    const Json options = {
        {"binary", chromium},
        {"args",
         {"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
          "--user-data-dir=" + folder + "/profile"}},
    };
    const Json session = Call("POST", "/session",
                              {{"capabilities",
                                {{"alwaysMatch",
                                  {{"browserName", "chrome"},
                                   {"goog:loggingPrefs", {{"browser", "ALL"}}},
                                   {"goog:chromeOptions", options}}}}}});
    if (session.is_object()) session_ = "/session/" + session.value("sessionId", "");
  }

  ~Browser() {
    if (ready()) Call("DELETE", session_, {});
  }

  bool ready() const { return !session_.empty(); }

  // The width and height of the page's window in CSS pixels, and the colours that the system asks
  // for.
  void Resize(int width, int height, bool dark) {
    Devtools("Emulation.setDeviceMetricsOverride",
             {{"width", width}, {"height", height}, {"deviceScaleFactor", 1}, {"mobile", false}});
    Devtools(
        "Emulation.setEmulatedMedia",
        {{"features", {{{"name", "prefers-color-scheme"}, {"value", dark ? "dark" : "light"}}}}});
  }

  // Forgets what earlier pages wrote to the console.
  void Open(const std::string& file) {
    Console();
    Call("POST", session_ + "/url", {{"url", "file://" + file}});
    EXPECT_TRUE(Script("return document.readyState === 'complete' && !!window.dim0").get<bool>());
    Settle();
  }

  // What the function body `code` returns.
  Json Script(const std::string& code) {
    return Call("POST", session_ + "/execute/sync", {{"script", code}, {"args", Json::array()}});
  }

  // Returns once what was asked for has been drawn.
  void Settle() {
    Call("POST", session_ + "/execute/async",
         {{"script",
           "const done = arguments[0];"
           "requestAnimationFrame(() => requestAnimationFrame(() => done()))"},
          {"args", Json::array()}});
  }

  // What the page wrote to the console since the last call, errors of the browser included.
  Json Console() { return Call("POST", session_ + "/se/log", {{"type", "browser"}}); }

  void MovePointer(const Json& point) { Act(Pointer({Move(point)})); }

  void Drag(const Json& from, const Json& to) {
    const Json middle = {{"x", (Number(from, "x") + Number(to, "x")) / 2}, {"y", from["y"]}};
    Act(Pointer({Move(from),
                 {{"type", "pointerDown"}, {"button", 0}},
                 Move(middle),
                 Move(to),
                 {{"type", "pointerUp"}, {"button", 0}}}));
  }

  // Touches each first point with a finger, moves the fingers to the second ones and lifts them.
  void Touch(const std::vector<std::pair<Json, Json>>& fingers) {
    Json sources = Json::array();
    for (size_t finger = 0; finger < fingers.size(); ++finger) {
      const auto& [from, to] = fingers[finger];
      sources.push_back(Pointer({Move(from),
                                 {{"type", "pointerDown"}, {"button", 0}},
                                 Move(to),
                                 {{"type", "pointerUp"}, {"button", 0}}})[0]);
      sources.back()["id"] = absl::StrCat("finger ", finger);
      sources.back()["parameters"]["pointerType"] = "touch";
    }
    Act(sources);
  }

  // Negative pixels: the wheel turned away from the user.
  void Wheel(const Json& point, int pixels) {
    Act({{{"type", "wheel"},
          {"id", "wheel"},
          {"actions",
           {{{"type", "scroll"},
             {"x", std::lround(Number(point, "x"))},
             {"y", std::lround(Number(point, "y"))},
             {"deltaX", 0},
             {"deltaY", pixels},
             {"duration", 0},
             {"origin", "viewport"}}}}}});
  }

  // A key as WebDriver names it: a character, or a code point of the private use area.
  void Press(const std::string& key) {
    Act({{{"type", "key"},
          {"id", "keyboard"},
          {"actions",
           {{{"type", "keyDown"}, {"value", key}}, {{"type", "keyUp"}, {"value", key}}}}}});
  }

 private:
  static double Number(const Json& point, const char* key) { return point[key].get<double>(); }

  static Json Move(const Json& point) {
    return {{"type", "pointerMove"},
            {"duration", 0},
            {"x", std::lround(Number(point, "x"))},
            {"y", std::lround(Number(point, "y"))}};
  }

  static Json Pointer(Json::array_t actions) {
    return {{{"type", "pointer"},
             {"id", "mouse"},
             {"parameters", {{"pointerType", "mouse"}}},
             {"actions", std::move(actions)}}};
  }

  void Act(const Json& sources) {
    Call("POST", session_ + "/actions", {{"actions", sources}});
    Settle();
  }

  void Devtools(const std::string& command, const Json& parameters) {
    Call("POST", session_ + "/goog/cdp/execute", {{"cmd", command}, {"params", parameters}});
  }

  // The "value" of the answer. An error fails the test.
  Json Call(const std::string& method, const std::string& path, const Json& body) {
    const httplib::Result result = method == "DELETE"
                                       ? client_->Delete(path)
                                       : client_->Post(path, body.dump(), "application/json");
    if (!result) {
      ADD_FAILURE() << path << ": " << httplib::to_string(result.error());
      return nullptr;
    }
    Json answer = Json::parse(result->body, nullptr, /*allow_exceptions=*/false);
    EXPECT_EQ(result->status, 200)
        << path << " " << body.dump().substr(0, 300) << ": " << result->body.substr(0, 500);
    return answer.is_object() ? answer["value"] : nullptr;
  }

  RunningProgram driver_;
  std::unique_ptr<httplib::Client> client_;
  std::string session_;
};

constexpr int64_t kStart = 1'700'000'000'000'000;  // microseconds since the epoch

TraceOp Op(int64_t id, int64_t step, const std::string& name, OpKind kind, const std::string& phase,
           int64_t begin, int64_t end) {
  TraceOp op;
  op.id = id;
  op.step = step;
  op.name = name;
  op.kind = kind;
  op.unit = "h.0";
  op.phase = phase;
  op.enqueued = op.begin = begin;
  op.end = end;
  return op;
}

TraceOp CollectiveOp(TraceOp op, Purpose purpose, const std::string& operation, int64_t met,
                     int64_t bytes_sent) {
  TraceCollective collective;
  collective.operation = operation;
  collective.channel = operation + " channel";
  collective.purpose = purpose;
  collective.dtype = DType::kFloat32;
  collective.sequence = op.step;
  collective.in_elements = 750'000;
  collective.out_elements = 1'500'000;
  collective.bytes_sent = bytes_sent;
  collective.met = met;
  op.collective = collective;
  return op;
}

// Steps 5 and 6 of one unit, 10 ms each, on this rank:
//   all_gather      0 to 2 ms, met at 0.5 ms (rank 1 arrives then, and rank 0 waits)
//   compute         waits for it, 2 to 5 ms forward
//   reduce_scatter  5 to 7 ms
//   optimizer       7 to 9 ms
// and under Muon 20 ms each: its gather from 9 to 11 ms, and more of the optimizer from 11 to 19.
RankTrace MakeRank(int rank, bool muon) {
  const int64_t length = muon ? 20'000 : 10'000;
  RankTrace trace;
  trace.rank = rank;
  trace.world_size = 2;
  trace.backend = "gloo";
  trace.model = "one block";
  trace.parameters = 1'500'000;
  trace.flags = {{"optimizer", muon ? "muon" : "adamw"}, {"seed", "1"}};
  TraceStream compute{.name = "compute", .number = 7};
  TraceStream all_gather{.name = "all_gather", .number = 20};
  TraceStream reduce_scatter{.name = "reduce_scatter", .number = 21};
  TraceStream optimizer{.name = "optimizer", .number = 22};
  TraceStream muon_gather{.name = "muon_gather", .number = 23};
  int64_t id = 0;
  for (int64_t step : {5, 6}) {
    const int64_t begin = kStart + (step - 5) * length;
    trace.steps.push_back({step, begin, begin + length});
    const int64_t arrival = begin + (rank == 1 ? 500 : 0);
    all_gather.ops.push_back(CollectiveOp(
        Op(++id, step, "all_gather h.0", OpKind::kCollective, "forward", arrival, begin + 2000),
        Purpose::kParameter, "all_gather", begin + 500, 3'000'000));
    compute.waits.push_back({begin, begin + 2000, id, "all_gather"});
    compute.ops.push_back(
        Op(++id, step, "linear h.0", OpKind::kCompute, "forward", begin + 2000, begin + 5000));
    compute.ops.back().flops = 6e9;
    reduce_scatter.ops.push_back(
        CollectiveOp(Op(++id, step, "reduce_scatter h.0", OpKind::kCollective, "backward",
                        begin + 5000, begin + 7000),
                     Purpose::kGradient, "reduce_scatter", begin + 5000, 3'000'000));
    optimizer.ops.push_back(
        Op(++id, step, "update h.0", OpKind::kOptimizer, "update", begin + 7000, begin + 9000));
    trace.memory.push_back({begin, {1 << 20, 1 << 20, 2 << 20, 0, 0, 0, 0}});
    trace.memory.push_back({begin + 1000, {1 << 20, 1 << 20, 2 << 20, 3 << 20, 0, 0, 0}});
    if (!muon) continue;
    muon_gather.ops.push_back(CollectiveOp(Op(++id, step, "muon_gather h.0", OpKind::kCollective,
                                              "update", begin + 9000, begin + 11'000),
                                           Purpose::kOptimizer, "all_to_all", begin + 9000,
                                           1'000'000));
    optimizer.ops.push_back(Op(++id, step, "newton_schulz h.0", OpKind::kOptimizer, "update",
                               begin + 11'000, begin + 19'000));
  }
  trace.streams = {compute, all_gather, reduce_scatter, optimizer};
  if (muon) trace.streams.push_back(muon_gather);
  return trace;
}

// The sums of MakeRank's times.
RankReport MakeRankReport(int rank, bool muon) {
  RankReport report;
  report.rank = rank;
  report.step = muon ? 20 : 10;
  report.split.compute = 3;
  report.split.optimizer_compute = muon ? 10 : 2;
  report.split.exposed = {2, 2, muon ? 2.0 : 0.0, 0};
  report.split.idle = 1;
  report.overlap[0] = {.communication = 2,
                       .hidden = 0,
                       .waiting = rank == 0 ? 0.5 : 0,
                       .bytes = 3'000'000,
                       .calls = 1,
                       .bandwidth = 2};
  report.overlap[1] = {.communication = 2, .bytes = 3'000'000, .calls = 1, .bandwidth = 1.5};
  if (muon) {
    report.overlap[2] = {.communication = 2, .bytes = 1'000'000, .calls = 1, .bandwidth = 0.5};
  }
  return report;
}

TracedRun MakeRun(const std::string& label, bool muon) {
  TracedRun run;
  run.label = label;
  for (int rank : {0, 1}) {
    run.ranks.push_back(MakeRank(rank, muon));
    run.report.ranks.push_back(MakeRankReport(rank, muon));
  }
  run.report.first_step = 5;
  run.report.last_step = 6;
  run.report.steps = 2;
  run.report.mean = run.report.ranks[0];
  run.report.most_exposed = {{.name = "all_gather h.0",
                              .unit = "h.0",
                              .phase = "forward",
                              .purpose = Purpose::kParameter,
                              .rank = 0,
                              .exposed = 2,
                              .duration = 2,
                              .reason = "waited for rank 1"}};
  run.report.slowest_rank = 1;
  run.report.slowest_by = 0.5;
  for (int64_t step = 1; step <= 10; ++step) run.losses.emplace_back(step, 5.0 - 0.1 * step);
  run.validation_losses = {{5, 4.6}, {10, 4.1}};
  return run;
}

std::vector<TracedRun> TwoRuns() {
  return {MakeRun("runs/adamw", false), MakeRun("runs/muon", true)};
}

// What the page carries, as it reads it.
Json DataOf(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const size_t from = page.find(begin) + begin.size();
  return Json::parse(page.substr(from, page.find("</script>", from) - from));
}

class TracePageInBrowser : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string driver = FindProgram({"chromedriver"});
    const std::string chromium = FindProgram({"chromium", "chromium-browser", "google-chrome"});
    if (driver.empty() || chromium.empty()) {
      why_skipped_ =
          "needs chromium and chromedriver on PATH: apt-get install chromium "
          "chromium-driver";
      return;
    }
    // By this name chromedriver calls Chromium.
    addrinfo* localhost = nullptr;
    if (::getaddrinfo("localhost", nullptr, nullptr, &localhost) != 0) {
      why_skipped_ = "the name localhost is not known here; it belongs into /etc/hosts";
      return;
    }
    ::freeaddrinfo(localhost);
    std::string pattern = ::testing::TempDir() + "trace_page_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = new std::string(pattern);
    // Where Chromium may keep what does not belong to the profile.
    ::setenv("HOME", folder_->c_str(), 1);
    browser_ = new Browser(driver, chromium, *folder_);
  }

  static void TearDownTestSuite() {
    delete browser_;
    browser_ = nullptr;
    if (folder_ == nullptr) return;
    std::error_code ignored;
    std::filesystem::remove_all(*folder_, ignored);
    delete folder_;
    folder_ = nullptr;
  }

  void SetUp() override {
    if (browser_ == nullptr) GTEST_SKIP() << why_skipped_;
    ASSERT_TRUE(browser_->ready());
  }

  void Open(absl::Span<const TracedRun> runs, int width = 1280, bool dark = false) {
    const std::string file = *folder_ + "/page.html";
    std::ofstream(file) << TracePage(runs);
    browser_->Resize(width, 800, dark);
    browser_->Open(file);
  }

  // With the timeline of `run` where the pointer reaches it.
  void OpenTimeline(absl::Span<const TracedRun> runs, int run = 0) {
    Open(runs);
    Script(absl::StrCat("document.querySelectorAll('#timeline canvas')[", run,
                        "].scrollIntoView({block: 'center'})"));
    browser_->Settle();
  }

  Json Script(const std::string& code) { return browser_->Script(code); }
  double Number(const std::string& expression) {
    return Script("return " + expression).get<double>();
  }
  std::string Text(const std::string& selector) {
    return Script(absl::StrCat("return document.querySelector('", selector, "').innerText"));
  }
  // Where a time, in microseconds since the run's first step, stands on a row.
  Json Point(int run, int row, int64_t time) {
    return Script(absl::StrCat("return dim0.point(", run, ", ", row, ", ", time, ")"));
  }
  // What the tooltip says, a line for each of its parts; "" while it is hidden.
  std::string Tip() {
    return Script(
               "const tip = document.getElementById('tip'); return tip.hidden ? '' :"
               " tip.innerText")
        .get<std::string>();
  }
  void ExpectQuietConsole() {
    const Json console = browser_->Console();
    EXPECT_TRUE(console.is_array() && console.empty()) << console.dump(1);
  }
  void ExpectVisible(double begin, double end) {
    EXPECT_NEAR(Number("dim0.view.begin"), begin, 1e-6);
    EXPECT_NEAR(Number("dim0.view.end"), end, 1e-6);
  }

  static const char* why_skipped_;  // if there is no browser
  static Browser* browser_;
  static std::string* folder_;
};

const char* TracePageInBrowser::why_skipped_ = "";
Browser* TracePageInBrowser::browser_ = nullptr;
std::string* TracePageInBrowser::folder_ = nullptr;

TEST_F(TracePageInBrowser, LoadsWithoutAWordOnTheConsoleAndFitsWideAndNarrowLightAndDark) {
  const std::vector<TracedRun> two = TwoRuns();
  for (const auto& runs : {two, std::vector<TracedRun>{two[1]}}) {
    for (int width : {1280, 400}) {
      std::vector<std::string> backgrounds;
      for (bool dark : {false, true}) {
        SCOPED_TRACE(absl::StrCat(runs.size(), " runs, ", width, " pixels, dark: ", dark));
        Open(runs, width, dark);
        EXPECT_EQ(Number("innerWidth"), width);
        EXPECT_LE(Number("document.documentElement.scrollWidth"), width);
        // Opened, too, the tables keep to the page.
        Script("for (const each of document.querySelectorAll('details')) each.open = true");
        browser_->Settle();
        EXPECT_LE(Number("document.documentElement.scrollWidth"), width);
        EXPECT_EQ(Number("document.querySelectorAll('#timeline canvas').length"), runs.size());
        backgrounds.push_back(Script("return getComputedStyle(document.body).backgroundColor"));
        ExpectQuietConsole();
      }
      EXPECT_NE(backgrounds[0], backgrounds[1]);
    }
  }
}

TEST_F(TracePageInBrowser, ConsoleOfABrokenPageIsNotEmpty) {
  // So that the test above can fail.
  Open(TwoRuns());
  Script("setTimeout(() => { throw new Error('on purpose'); }, 0)");
  EXPECT_TRUE(
      WaitUntil([&] { return absl::StrContains(browser_->Console().dump(), "on purpose"); }));
}

TEST_F(TracePageInBrowser, TheButtonSwitchesTheColours) {
  Open(TwoRuns());
  const std::string light = Script("return getComputedStyle(document.body).backgroundColor");
  Script("document.getElementById('theme').click()");
  const std::string dark = Script("return getComputedStyle(document.body).backgroundColor");
  EXPECT_NE(light, dark);
  Script("document.getElementById('theme').click()");
  EXPECT_EQ(Script("return getComputedStyle(document.body).backgroundColor"), light);
}

TEST_F(TracePageInBrowser, TheTimelineHasARowForEveryStreamOfEveryRank) {
  Open(TwoRuns());
  const Json adamw = Script("return dim0.rows(0)");
  ASSERT_EQ(adamw.size(), 8u);
  EXPECT_EQ(adamw[0], Json({{"rank", 0}, {"stream", "compute"}}));
  EXPECT_EQ(adamw[7], Json({{"rank", 1}, {"stream", "optimizer"}}));
  const Json muon = Script("return dim0.rows(1)");
  ASSERT_EQ(muon.size(), 10u);
  EXPECT_EQ(muon[9], Json({{"rank", 1}, {"stream", "muon_gather"}}));
}

TEST_F(TracePageInBrowser, AnOpIsDrawnWhereItsTimesAreInTheColourOfItsPurpose) {
  Open(TwoRuns());
  // The colour of the pixel at a time of the first run's row, as the canvas has it.
  const auto pixel = [&](int row, int64_t time) {
    return Script(absl::StrCat(
        "const point = dim0.point(0, ", row, ", ", time,
        ");"
        "const canvas = document.querySelector('#timeline canvas');"
        "const box = canvas.getBoundingClientRect();"
        "const data = canvas.getContext('2d').getImageData(point.x - box.left,"
        " point.y - box.top + 4, 1, 1).data;"
        "return '#' + [...data].slice(0, 3).map((v) => v.toString(16).padStart(2, '0')).join('')"));
  };
  const auto color = [&](const std::string& name) {
    return Script("return getComputedStyle(document.documentElement).getPropertyValue('--" + name +
                  "').trim()");
  };
  EXPECT_EQ(pixel(0, 4900), color("forward"));
  EXPECT_EQ(pixel(1, 1900), color("parameter"));
  EXPECT_EQ(pixel(2, 6900), color("gradient"));
  EXPECT_EQ(pixel(3, 8900), color("optimizer"));
  // Nothing ran; and until the ranks met, the colour is paler.
  EXPECT_EQ(pixel(3, 6000), color("band"));
  EXPECT_NE(pixel(1, 250), color("parameter"));
  EXPECT_NE(pixel(1, 250), color("band"));
}

TEST_F(TracePageInBrowser, TheWheelZoomsAroundThePointerAndResetShowsAllAgain) {
  OpenTimeline(TwoRuns(), 1);
  // Two steps of 20 ms.
  ExpectVisible(0, 40'000);
  const Json point = Point(1, 2, 30'000);
  browser_->Wheel(point, -200);
  // 200 pixels double the scale.
  const double span = Number("dim0.view.span");
  EXPECT_NEAR(span, 20'000, 1);
  // The pointer stands on whole pixels, of which one is some 35 microseconds.
  const double there = Number(absl::StrCat("dim0.timeAt(1, ", point["x"].dump(), ")"));
  EXPECT_NEAR(there, 30'000, 40);
  EXPECT_NEAR(Number("dim0.view.begin"), 15'000, 40);
  // All runs share the range: time 30 000 stands at one x in both.
  EXPECT_NEAR(Point(0, 0, 30'000)["x"].get<double>(), Point(1, 0, 30'000)["x"].get<double>(), 1e-6);
  EXPECT_THAT(Text("#range"), HasSubstr("15.0 to 35.0 ms"));

  browser_->Wheel(point, 100);
  EXPECT_NEAR(Number("dim0.view.span"), 20'000 * std::sqrt(2.0), 1);

  Script("document.getElementById('reset').click()");
  ExpectVisible(0, 40'000);
}

TEST_F(TracePageInBrowser, TheWheelScrollsThePageWhereNothingIsLeftToShow) {
  OpenTimeline(TwoRuns());
  const double before = Number("scrollY");
  browser_->Wheel(Point(0, 0, 20'000), 120);
  EXPECT_TRUE(WaitUntil([&] { return Number("scrollY") > before; }));
  ExpectVisible(0, 40'000);
}

TEST_F(TracePageInBrowser, DraggingMovesAndStopsAtTheEnds) {
  OpenTimeline(TwoRuns());
  Script("dim0.view.set(10000, 20000)");
  browser_->Settle();
  // What is at 15 ms is dragged to where 12 ms was.
  browser_->Drag(Point(0, 1, 15'000), Point(0, 1, 12'000));
  EXPECT_NEAR(Number("dim0.view.begin"), 13'000, 20);
  EXPECT_NEAR(Number("dim0.view.span"), 10'000, 1e-6);
  browser_->Drag(Point(0, 1, 14'000), Point(0, 1, 22'000));
  browser_->Drag(Point(0, 1, 6'000), Point(0, 1, 14'000));
  ExpectVisible(0, 10'000);
}

TEST_F(TracePageInBrowser, KeysAndButtonsZoomAndMove) {
  OpenTimeline(TwoRuns());
  Script("document.querySelector('#timeline canvas').focus()");
  // By 1.5, around the middle.
  browser_->Press("+");
  ExpectVisible(20'000 - 20'000 / 1.5, 20'000 + 20'000 / 1.5);
  browser_->Press("0");
  ExpectVisible(0, 40'000);
  Script("document.getElementById('zoom-in').click(); document.getElementById('pan-left').click()");
  const double span = 40'000 / 1.5;
  // A fifth of what is visible, to the left.
  ExpectVisible(20'000 - span / 2 - span / 5, 20'000 + span / 2 - span / 5);
  browser_->Press("\uE014");  // right arrow
  ExpectVisible(20'000 - span / 2, 20'000 + span / 2);
  browser_->Press("-");
  ExpectVisible(0, 40'000);
}

TEST_F(TracePageInBrowser, HoveringShowsTheOpUnderThePointer) {
  OpenTimeline(TwoRuns());
  // Rank 0's all_gather of step 6, which begins with it.
  browser_->MovePointer(Point(0, 1, 11'000));
  // 3 MB in the 1.5 ms after the ranks had met.
  EXPECT_THAT(
      Tip(), AllOf(HasSubstr("all_gather h.0"), HasSubstr("unit\nh.0"), HasSubstr("phase\nforward"),
                   HasSubstr("step\n6"), HasSubstr("begin in step\n0 µs"),
                   HasSubstr("duration\n2.00 ms"), HasSubstr("purpose\nparameter"),
                   HasSubstr("waited for ranks\n500 µs"), HasSubstr("sent\n2.86 MiB"),
                   HasSubstr("2.00 GB/s"), HasSubstr("all_gather 6 on all_gather channel")));
  // Rank 1's, which came last.
  browser_->MovePointer(Point(0, 5, 11'000));
  EXPECT_THAT(Tip(), AllOf(HasSubstr("rank 1"), HasSubstr("begin in step\n500 µs"),
                           HasSubstr("waited for ranks\n0 µs")));
  // 6 GFLOP in 3 ms.
  browser_->MovePointer(Point(0, 0, 4000));
  EXPECT_THAT(Tip(), AllOf(HasSubstr("linear h.0"), HasSubstr("step\n5"), HasSubstr("2.00 TFLOP/s"),
                           Not(HasSubstr("waited"))));
  browser_->MovePointer(Point(0, 0, 11'000));
  EXPECT_THAT(Tip(), AllOf(HasSubstr("wait"), HasSubstr("for\nall_gather h.0, on all_gather"),
                           HasSubstr("duration\n2.00 ms")));
  // Nothing runs there.
  browser_->MovePointer(Point(0, 3, 15'000));
  EXPECT_EQ(Tip(), "");
}

TEST_F(TracePageInBrowser, ATapShowsTheOpAndTwoFingersZoomBetweenThem) {
  OpenTimeline(TwoRuns());
  const Json tap = Point(0, 1, 11'000);
  browser_->Touch({{tap, tap}});
  EXPECT_THAT(Tip(), AllOf(HasSubstr("all_gather h.0"), HasSubstr("step\n6")));
  // What was between the fingers, 16 to 24 ms, fills twice as many pixels: around 20 ms.
  browser_->Touch(
      {{Point(0, 1, 16'000), Point(0, 1, 12'000)}, {Point(0, 1, 24'000), Point(0, 1, 28'000)}});
  EXPECT_NEAR(Number("dim0.view.span"), 20'000, 150);
  EXPECT_NEAR(Number("dim0.view.begin"), 10'000, 150);
}

TEST_F(TracePageInBrowser, KeysStepThroughTheOpsOfARow) {
  OpenTimeline(TwoRuns());
  Script("document.querySelector('#timeline canvas').focus()");
  browser_->Press("\uE015");  // down: the first row
  EXPECT_THAT(Tip(), AllOf(HasSubstr("linear h.0"), HasSubstr("step\n5")));
  browser_->Press(".");
  EXPECT_THAT(Tip(), AllOf(HasSubstr("linear h.0"), HasSubstr("step\n6")));
  browser_->Press("\uE015");
  EXPECT_THAT(Tip(), HasSubstr("all_gather"));
  browser_->Press("\uE00C");  // escape
  EXPECT_EQ(Tip(), "");
}

TEST_F(TracePageInBrowser, BarsAddUpToTheStepOnOneScale) {
  Open(TwoRuns());
  const Json bars = Script(
      "return [...document.querySelectorAll('.bar')].map((bar) => ({"
      "  width: bar.getBoundingClientRect().width,"
      "  parts: [...bar.children].map((part) => ({name: part.dataset.part,"
      "    ms: Number(part.dataset.ms), width: part.getBoundingClientRect().width})),"
      "}))");
  ASSERT_EQ(bars.size(), 4u);
  const std::vector<std::pair<std::string, double>> adamw = {{"compute", 3},
                                                             {"optimizer compute", 2},
                                                             {"exposed parameter communication", 2},
                                                             {"exposed gradient communication", 2},
                                                             {"idle", 1}};
  const std::vector<std::pair<std::string, double>> muon = {{"compute", 3},
                                                            {"optimizer compute", 10},
                                                            {"exposed parameter communication", 2},
                                                            {"exposed gradient communication", 2},
                                                            {"exposed optimizer communication", 2},
                                                            {"idle", 1}};
  for (int bar = 0; bar < 4; ++bar) {
    const auto& expected = bar < 2 ? adamw : muon;
    const Json& parts = bars[bar]["parts"];
    ASSERT_EQ(parts.size(), expected.size());
    for (size_t part = 0; part < expected.size(); ++part) {
      EXPECT_EQ(parts[part]["name"], expected[part].first);
      EXPECT_EQ(parts[part]["ms"], expected[part].second);
      // The longest step, 20 ms, is as wide as the scale.
      EXPECT_NEAR(parts[part]["width"].get<double>(),
                  bars[bar]["width"].get<double>() * expected[part].second / 20, 0.1);
    }
  }
  EXPECT_THAT(Text(".bar-row"),
              AllOf(HasSubstr("rank 0"), HasSubstr("30 %"), HasSubstr("10.0 ms")));
}

TEST_F(TracePageInBrowser, TheTopSaysWhatMattersOfEachRun) {
  Open(TwoRuns());
  const auto measure = [&](int run, const std::string& name) {
    return Text(
        absl::StrCat("#summary .run:nth-child(", run + 1, ") [data-measure=", name, "] dd"));
  };
  EXPECT_EQ(measure(0, "step"), "10.0 ms");
  EXPECT_EQ(measure(0, "compute"), "30 %");
  EXPECT_EQ(measure(0, "exposed"), "40 %");
  EXPECT_EQ(measure(0, "hidden-optimizer"), "none");
  EXPECT_EQ(measure(1, "step"), "20.0 ms");
  EXPECT_EQ(measure(1, "exposed"), "30 %");
  EXPECT_EQ(measure(1, "hidden-optimizer"), "0 %");
  // Of the two flags one differs.
  EXPECT_EQ(Text("#summary .run .chips"), "optimizer=adamw");
  EXPECT_THAT(Text("#exposed"),
              AllOf(HasSubstr("waited for rank 1"),
                    HasSubstr("Rank 1 made the others wait the longest: 0.500 ms")));
}

TEST_F(TracePageInBrowser, MemoryIsThatOfTheTimeUnderThePointer) {
  Open(TwoRuns());
  Script("document.querySelector('#memory canvas').scrollIntoView({block: 'center'})");
  browser_->Settle();
  const auto point = [&](int64_t time) {
    Json at = Point(0, 0, time);
    at["y"] = Number("document.querySelector('#memory canvas').getBoundingClientRect().y + 60");
    return at;
  };
  browser_->MovePointer(point(500));
  EXPECT_THAT(Tip(), AllOf(HasSubstr("4.00 MiB"), HasSubstr("optimizer\n2.00 MiB"),
                           Not(HasSubstr("gathered"))));
  browser_->MovePointer(point(5000));
  EXPECT_THAT(Tip(), AllOf(HasSubstr("7.00 MiB"), HasSubstr("gathered\n3.00 MiB")));
}

TEST_F(TracePageInBrowser, LossesAreShownWhereThereAreAny) {
  std::vector<TracedRun> runs = TwoRuns();
  Open(runs);
  EXPECT_EQ(Number("document.querySelectorAll('#loss-chart path.curve').length"), 2);
  EXPECT_EQ(Number("document.querySelectorAll('#loss-chart circle.curve').length"), 4);
  EXPECT_THAT(Text("#loss-legend"), HasSubstr("4.0000 at step 10, validation 4.1000"));
  // A loss that is not a number leaves a gap in the line.
  runs[0].losses[4].second = std::numeric_limits<double>::quiet_NaN();
  Open({runs[0]});
  EXPECT_EQ(Number("document.querySelector('#loss-chart path.curve').getAttribute('d')"
                   ".split('M').length - 1"),
            2);
  for (TracedRun& run : runs) {
    run.losses.clear();
    run.validation_losses.clear();
  }
  Open(runs);
  EXPECT_TRUE(Script("return document.getElementById('loss').hidden").get<bool>());
}

TEST_F(TracePageInBrowser, StringsOfATraceAreTextWhateverTheyHold) {
  const std::string nasty =
      "</script><img src=x onerror=\"document.title='hit'\"> <!-- & ' \u00e9 @DATA@";
  std::vector<TracedRun> runs = TwoRuns();
  runs[0].label = nasty;
  runs[0].ranks[0].flags["note"] = nasty;
  runs[0].ranks[0].streams[0].name = nasty;
  runs[0].ranks[0].streams[0].ops[0].name = nasty;
  runs[0].report.most_exposed[0].reason = nasty;
  // Not UTF-8.
  runs[1].label = "runs/\xff";
  OpenTimeline(runs);
  EXPECT_EQ(Number("document.images.length"), 0);
  EXPECT_THAT(Text("#summary h2"), nasty);
  EXPECT_EQ(Script("return dim0.rows(0)")[0]["stream"], nasty);
  browser_->MovePointer(Point(0, 0, 4000));
  EXPECT_THAT(Tip(), HasSubstr(nasty));
  EXPECT_THAT(Text("#summary .run:nth-child(2) h2"), "runs/\uFFFD");
  ExpectQuietConsole();
}

TEST_F(TracePageInBrowser, ATraceOfOneRankWithoutCollectivesOrMemoryIsShown) {
  TracedRun run = MakeRun("alone", false);
  run.ranks.resize(1);
  run.report.ranks.resize(1);
  run.report.most_exposed.clear();
  run.ranks[0].world_size = 1;
  run.ranks[0].memory.clear();
  run.ranks[0].streams.resize(1);
  run.ranks[0].cut_short = true;
  for (RankReport* report : {&run.report.ranks[0], &run.report.mean}) {
    report->overlap = {};
    report->split.exposed = {};
  }
  Open({run});
  EXPECT_EQ(Script("return dim0.rows(0)").size(), 1u);
  EXPECT_THAT(Text("#notices"), HasSubstr("cut short"));
  EXPECT_THAT(Text("#overlap"), HasSubstr("No rank communicated"));
  EXPECT_TRUE(Script("return document.getElementById('memory').hidden").get<bool>());
  ExpectQuietConsole();
}

TEST_F(TracePageInBrowser, StepsOfNoLengthAreShown) {
  std::vector<TracedRun> runs = TwoRuns();
  for (TracedRun& run : runs) {
    for (RankTrace& trace : run.ranks) {
      for (TraceStep& step : trace.steps) step.end = step.begin = kStart;
      for (TraceStream& stream : trace.streams) stream.ops.clear(), stream.waits.clear();
    }
    for (RankReport& report : run.report.ranks) report.step = 0, report.split = {};
    run.report.mean = run.report.ranks[0];
  }
  Open(runs);
  EXPECT_EQ(Number("document.querySelectorAll('#timeline canvas').length"), 2);
  EXPECT_THAT(Text("#split-bars"), HasSubstr("0 ms"));
  Script(
      "for (const id of ['zoom-in', 'zoom-out', 'pan-left', 'reset'])"
      " document.getElementById(id).click()");
  browser_->Settle();
  ExpectQuietConsole();
}

TEST_F(TracePageInBrowser, LossesOfAnySizeAreShown) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const std::vector<std::pair<int64_t, double>> curves[] = {{{1, 0}},
                                                            {{1, 1e17}, {2, 1e17}},
                                                            {{1, -1e300}, {2, 1e299}},
                                                            {{1, kMost}, {2, -kMost}, {3, 1}},
                                                            {{1, 5e-324}, {2, 1e-320}},
                                                            {{int64_t{1} << 53, 1}},
                                                            {{0, 1}, {int64_t{1} << 53, 2}}};
  for (const auto& losses : curves) {
    SCOPED_TRACE(absl::StrCat(losses[0].first, " ", losses[0].second));
    TracedRun run = MakeRun("run", false);
    run.losses = losses;
    run.validation_losses.clear();
    Open({run});
    const double lines = Number("document.querySelectorAll('#loss-chart .gridline').length");
    EXPECT_GE(lines, 1);
    EXPECT_LE(lines, 12);
    ExpectQuietConsole();
  }
}

// A rank of one stream with so many ops a step, each followed by a pause of its length.
RankTrace ManyOps(int rank, int world_size, int64_t steps, int64_t ops_per_step) {
  RankTrace trace;
  trace.rank = rank;
  trace.world_size = world_size;
  trace.streams.resize(1);
  trace.streams[0].name = "compute";
  int64_t time = kStart, id = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    const int64_t begin = time;
    for (int64_t i = 0; i < ops_per_step; ++i, time += 200) {
      trace.streams[0].ops.push_back(Op(++id, step, absl::StrCat("op ", i % 100), OpKind::kCompute,
                                        "forward", time, time + 100));
    }
    trace.steps.push_back({step, begin, time});
  }
  return trace;
}

TEST_F(TracePageInBrowser, APageOfManyOpsShowsTheFirstStepsWholeAndSaysSo) {
  TracedRun run;
  run.label = "long";
  run.ranks = {ManyOps(0, 1, 4, 200'000)};
  run.report.ranks = {MakeRankReport(0, false)};
  run.report.mean = run.report.ranks[0];
  run.report.first_step = 1;
  run.report.last_step = run.report.steps = 4;
  Open({run});
  // Two steps of 200 000 ops fit into 500 000, of 40 s each.
  EXPECT_THAT(Text("#notices"), HasSubstr("the first 2 of 4 traced steps"));
  ExpectVisible(0, 80e6);
}

TEST(TracePage, AsksNoOtherMachineForAnything) {
  const std::string page = TracePage(TwoRuns());
  // Addresses that are names only: of SVG's elements.
  const std::string rest = page.substr(0, page.find("http://www.w3.org/2000/svg"));
  EXPECT_THAT(rest, AllOf(Not(HasSubstr("http:")), Not(HasSubstr("https:")), Not(HasSubstr("src=")),
                          Not(HasSubstr("@import")), Not(HasSubstr("url("))));
}

TEST(TracePage, ThreeRunsOfTwoRanksOf20000OpsStayUnder10MB) {
  std::vector<TracedRun> runs;
  for (int i = 0; i < 3; ++i) {
    TracedRun run;
    run.label = absl::StrCat("run ", i);
    for (int rank : {0, 1}) {
      RankTrace trace = ManyOps(rank, 2, 10, 2000);
      // Each with a wait of its own, as many changes of memory, and half of them collectives.
      for (size_t op = 0; op < trace.streams[0].ops.size(); ++op) {
        TraceOp& each = trace.streams[0].ops[op];
        trace.streams[0].waits.push_back({each.begin - 90, each.begin - 10, each.id, "compute"});
        trace.memory.push_back({each.begin, {1, static_cast<int64_t>((1 + op % 2) << 20)}});
        if (op % 2 == 0) {
          each = CollectiveOp(each, Purpose::kGradient, "reduce_scatter", each.begin + 50, 1 << 20);
          each.kind = OpKind::kCollective;
          each.collective->sequence = static_cast<int64_t>(op);
        }
      }
      run.ranks.push_back(std::move(trace));
    }
    runs.push_back(std::move(run));
  }
  const std::string page = TracePage(runs);
  EXPECT_LT(page.size(), 10'000'000u);
  // All of it: four numbers an op.
  const Json data = DataOf(page);
  ASSERT_EQ(data["runs"].size(), 3u);
  for (const Json& run : data["runs"]) {
    EXPECT_EQ(run["shownSteps"], 10);
    for (const Json& rank : run["ranks"]) {
      EXPECT_EQ(rank["streams"][0]["ops"].size(), 4 * 20'000u);
      EXPECT_EQ(rank["streams"][0]["collectives"].size(), 2 * 10'000u);
    }
  }
}

}  // namespace
}  // namespace dim0
