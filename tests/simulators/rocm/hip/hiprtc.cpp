// libhiprtc: "compiles" a HIP source for the CPU executor, with g++. What it made before it finds again, by a hash of the
// source and the options, in the folder `code` beside its own; CuPy's cache lies above that, and asks it to compile an
// empty kernel in every process, to see by the result which compiler it is.
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <spawn.h>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "code.h"

#define HIP_API extern "C" __attribute__((visibility("default")))
extern char **environ;
extern "C" int hipDeviceGetAttribute(int *value, int attribute, int device);

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    INTERNAL_ERROR = 11,
};

struct Program {
    std::string source, log, code;
};

// The folder that has lib/, executor/, include/ and code/.
std::string root() {
    Dl_info info;
    if (!dladdr((void *)&root, &info)) return ".";
    std::string path = info.dli_fname;
    for (int i = 0; i < 2; i++) path.erase(path.rfind('/'));
    return path;
}

// With HIPSTANDIN_FAULT=matrix, the lanes of the matrix unit hold other rows than the kernels take them to hold.
std::string with_fault(std::string source) {
    const char *fault = getenv("HIPSTANDIN_FAULT");
    if (!fault || strcmp(fault, "matrix") != 0) return source;
    const std::string right = "int matrix_row(int i) { return i; }", wrong = "int matrix_row(int i) { return i ^ 1; }";
    size_t at = source.find(right);
    return at == std::string::npos ? source : source.replace(at, right.size(), wrong);
}

std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
}
bool write_file(const std::string &path, const std::string &text) {
    std::ofstream file(path, std::ios::binary);
    file.write(text.data(), (std::streamsize)text.size());
    return (bool)file.flush();
}

// FNV-1a, twice with different beginnings.
std::string hash(const std::string &text) {
    uint64_t sums[] = {14695981039346656037ull, 1099511628211ull * 31};
    for (unsigned char byte : text)
        for (uint64_t &sum : sums) sum = (sum ^ byte) * 1099511628211ull;
    char name[40];
    snprintf(name, sizeof name, "%016llx%016llx", (unsigned long long)sums[0], (unsigned long long)sums[1]);
    return name;
}

// Runs a command with its three streams in files; its exit status, or -1.
int spawn(const std::vector<std::string> &command, const std::string &in, const std::string &out,
          const std::string &errors) {
    std::vector<char *> words;
    for (const std::string &word : command) words.push_back((char *)word.c_str());
    words.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, in.c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&files, 2, errors.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    // The stand-in's own libraries are not the compiler's.
    std::vector<char *> variables;
    for (char **variable = environ; *variable; variable++)
        if (strncmp(*variable, "LD_", 3) != 0) variables.push_back(*variable);
    variables.push_back(nullptr);
    pid_t child;
    int failed = posix_spawnp(&child, words[0], &files, nullptr, words.data(), variables.data());
    posix_spawn_file_actions_destroy(&files);
    if (failed) return -1;
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool begins(const std::string &text, const char *with) { return text.rfind(with, 0) == 0; }

// Sorts HIPRTC's options into g++'s; false: one of them is no option.
bool translate(const std::vector<std::string> &options, int wave, std::vector<std::string> *flags, std::string *log) {
    bool standard = false;
    const std::string given_wave = "-DRF_WAVE=";
    for (size_t i = 0; i < options.size(); i++) {
        std::string option = options[i];
        if (begins(option, "--std")) option.erase(0, 1);
        if (begins(option, given_wave.c_str()) && option != given_wave + std::to_string(wave)) {
            *log = "error: " + option + ", and the waves of this device have " + std::to_string(wave) + " lanes\n";
            return false;
        }
        if (begins(option, "-D") || begins(option, "-U") || begins(option, "-I")) {
            flags->push_back(option);
            if (option.size() == 2 && i + 1 < options.size()) flags->push_back(options[++i]);
        } else if (begins(option, "-std=")) {
            standard = true;
            flags->push_back(option);
        } else if (!begins(option, "-O") && option != "-fcuda-flush-denormals-to-zero") {
            // The CPU keeps denormals: that one changes results on a GPU only.
            *log = "error: unknown option: " + option + "\n";
            return false;
        }
    }
    if (!standard) flags->push_back("-std=c++17");
    return true;
}

// Behind the brackets that open at `at`.
size_t closed(const std::string &text, size_t at) {
    int depth = 0;
    for (; at < text.size(); at++) {
        depth += text[at] == '(' ? 1 : text[at] == ')' ? -1 : 0;
        if (depth == 0) return at + 1;
    }
    return at;
}

// The source without its launch bounds: for the compiler they are attributes, whose arguments it would read as its own.
std::string unbounded(std::string expanded) {
    const std::string bounds = "__attribute__((executor_launch_bounds(";
    for (size_t at = expanded.find(bounds); at != std::string::npos; at = expanded.find(bounds, at))
        expanded.erase(at, closed(expanded, expanded.find('(', at)) - at);
    return expanded;
}

// The table of the kernels of a preprocessed source, which gpu.h marks by attributes: one, perhaps the launch bounds, and
// `void` in any order, then the name.
std::string entries(const std::string &expanded) {
    const std::string kernel = "__attribute__((executor_kernel))", bounds = "__attribute__((executor_launch_bounds(";
    std::string table = "\nextern \"C\" __attribute__((visibility(\"default\"), used)) const executor::Entry "
                        "executor_entries[] = {\n";
    for (size_t at = expanded.find(kernel); at != std::string::npos; at = expanded.find(kernel, at)) {
        std::string name, most = "1024";
        for (at += kernel.size(); name.empty() && at < expanded.size();) {
            if (isspace((unsigned char)expanded[at])) {
                at++;
            } else if (expanded.compare(at, bounds.size(), bounds) == 0) {
                size_t begin = at + bounds.size(), end = closed(expanded, begin - 1) - 1;
                most = expanded.substr(begin, std::min(expanded.find(',', begin), end) - begin);
                at = closed(expanded, expanded.find('(', at));
            } else {
                size_t end = at;
                while (end < expanded.size() && (isalnum((unsigned char)expanded[end]) || expanded[end] == '_')) end++;
                std::string word = expanded.substr(at, end - at);
                at = end;
                if (word.empty()) break;
                if (word != "void") name = word;
            }
        }
        if (name.empty()) continue;
        std::string caller = "executor::Caller<&" + name + ">::";
        table += "{\"" + name + "\", " + caller + "call, " + caller + "parameters, " + caller + "count, (int)(" + most +
                 ")},\n";
    }
    return table + "{nullptr, nullptr, nullptr, 0, 0}};\n";
}

Result build(Program *program, const std::vector<std::string> &flags, int wave, const std::string &folder) {
    const char *chosen = getenv("CXX");
    std::string compiler = chosen && *chosen ? chosen : "g++", here = root(), log = folder + "/log";
    std::vector<std::string> common = {
        compiler, "-O2", "-fPIC", "-w", "-ffp-contract=off", "-D__HIPCC_RTC__=1", "-DHIP_VERSION=70051831",
        "-DHIP_VERSION_MAJOR=7", "-DRF_WAVE=" + std::to_string(wave)};
    common.insert(common.end(), flags.begin(), flags.end());
    std::vector<std::string> expand = common;
    expand.insert(expand.end(), {"-E", "-x", "c++", "-include", here + "/executor/gpu.h"});
    // CuPy's own kernels take more from HIP than the project's do.
    if (program->source.find("cupy/") != std::string::npos)
        expand.insert(expand.end(), {"-include", here + "/include/cupy_device.h"});
    expand.push_back("-");
    if (!write_file(folder + "/source", program->source)) return INTERNAL_ERROR;
    int status = spawn(expand, folder + "/source", folder + "/expanded", log);
    if (status == 0) {
        std::string expanded = read_file(folder + "/expanded");
        if (!write_file(folder + "/source", unbounded(expanded) + entries(expanded))) return INTERNAL_ERROR;
        std::vector<std::string> compile = common;
        compile.insert(
            compile.end(), {"-shared", "-s", "-fvisibility=hidden", "-fno-gnu-unique", "-x", "c++-cpp-output", "-",
                            "-x", "none", here + "/lib/libamdhip64.so.7", "-o", folder + "/library"});
        status = spawn(compile, folder + "/source", "/dev/null", log);
    }
    program->log = status < 0 ? "cannot run " + compiler + "\n" : read_file(log);
    if (status != 0) return status < 0 ? INTERNAL_ERROR : COMPILATION;
    std::string library = read_file(folder + "/library");
    CodeHeader header = {};
    memcpy(header.magic, CODE_MAGIC, sizeof CODE_MAGIC);
    header.bytes = library.size();
    std::string origin;
    for (const std::string &flag : flags) origin += flag + "\n";
    origin += "\n" + program->source;
    header.origin_bytes = origin.size();
    program->code = std::string((const char *)&header, sizeof header) + library + origin;
    return SUCCESS;
}

void remove_folder(const std::string &folder) {
    for (const char *name : {"/source", "/expanded", "/library", "/log"}) unlink((folder + name).c_str());
    rmdir(folder.c_str());
}

Result compile(Program *program, const std::vector<std::string> &options) {
    constexpr int WARP_SIZE = 87;
    int wave;
    if (hipDeviceGetAttribute(&wave, WARP_SIZE, 0)) return INTERNAL_ERROR;
    std::vector<std::string> flags;
    if (!translate(options, wave, &flags, &program->log)) return COMPILATION;
    std::string key = program->source + '\0' + std::to_string(wave);
    for (const std::string &flag : flags) key += '\0' + flag;
    std::string kept = root() + "/code", path = kept + "/" + hash(key);
    program->code = read_file(path);
    if (!program->code.empty()) return SUCCESS;
    mkdir(kept.c_str(), 0700);
    std::string folder = kept + "/XXXXXX";
    if (!mkdtemp(&folder[0])) {
        program->log = "cannot make a folder in " + kept + "\n";
        return INTERNAL_ERROR;
    }
    Result result = build(program, flags, wave, folder);
    // Whole, or not at all: another process may look for it now.
    if (result == SUCCESS && write_file(folder + "/library", program->code))
        rename((folder + "/library").c_str(), path.c_str());
    remove_folder(folder);
    return result;
}

}  // namespace

HIP_API const char *hiprtcGetErrorString(int result) {
    switch (result) {
        case SUCCESS: return "HIPRTC_SUCCESS";
        case INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "HIPRTC_ERROR_INVALID_PROGRAM";
        case INVALID_OPTION: return "HIPRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "HIPRTC_ERROR_COMPILATION";
        default: return "HIPRTC_ERROR_INTERNAL_ERROR";
    }
}
HIP_API int hiprtcVersion(int *major, int *minor) {
    if (!major || !minor) return INVALID_INPUT;
    *major = 7;
    *minor = 0;
    return SUCCESS;
}
HIP_API int hiprtcCreateProgram(
    Program **program, const char *source, const char *, int headers, const char **, const char **) {
    if (!program || !source || headers) return INVALID_INPUT;
    *program = new Program{with_fault(source), "", ""};
    return SUCCESS;
}
HIP_API int hiprtcDestroyProgram(Program **program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}
HIP_API int hiprtcCompileProgram(Program *program, int count, const char **options) {
    if (!program) return INVALID_PROGRAM;
    if (count < 0 || (count && !options)) return INVALID_INPUT;
    return compile(program, std::vector<std::string>(options, options + count));
}
HIP_API int hiprtcGetCodeSize(Program *program, size_t *size) {
    if (!program || !size) return INVALID_INPUT;
    *size = program->code.size();
    return SUCCESS;
}
HIP_API int hiprtcGetCode(Program *program, char *code) {
    if (!program || !code) return INVALID_INPUT;
    memcpy(code, program->code.data(), program->code.size());
    return SUCCESS;
}
HIP_API int hiprtcGetProgramLogSize(Program *program, size_t *size) {
    if (!program || !size) return INVALID_INPUT;
    *size = program->log.size() + 1;
    return SUCCESS;
}
HIP_API int hiprtcGetProgramLog(Program *program, char *log) {
    if (!program || !log) return INVALID_INPUT;
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}
