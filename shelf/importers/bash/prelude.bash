# Read by bash before the user's script, in the jail. Commands that bash does not have, and those
# that would change something, become functions that write a record into $__VJ/rec and answer.
__vj_call() {  # a command that would be started, with its words
    local __vj_out=$__VJ/rec/$EPOCHREALTIME.$BASHPID __vj_body= __vj_at __vj_asked=0
    if [[ -p /dev/stdout ]]; then __vj_asked=1; fi
    case " ${*: -1} $1 " in
    *" bash "* | *" sh "* | *" - "* | *" -s "* | *" sbatch "*)
        if builtin test ! -c /dev/stdin; then IFS= builtin read -r -d '' -t 1 -u 0 __vj_body; fi ;;
    esac
    {
        builtin printf '%s\0' "$#" "$@" "$PWD" "$__vj_asked" "$-" "$__vj_body" "${#BASH_LINENO[@]}"
        for ((__vj_at = 1; __vj_at < ${#BASH_LINENO[@]}; __vj_at++)); do
            builtin printf '%s\0' "${BASH_SOURCE[__vj_at]}" "${BASH_LINENO[__vj_at - 1]}"
        done
        builtin declare -px
        builtin printf '\0'
    } >"$__vj_out" 2>/dev/null
    builtin printf '@OUT:%s@\n' "${1##*/}" 2>/dev/null  # for the $(...) around it
    __vj_loop "$@"
    return 0
}
__vj_loop() {  # the same words from the same place again and again: a loop waits for them
    local __vj_file="$__VJ/loop.${BASH_LINENO[*]:1}" __vj_count=0 __vj_last=  # a file: this may be a subshell
    __vj_file=${__vj_file// /-}
    if builtin test -f "$__vj_file"; then { builtin read -r __vj_count; IFS= builtin read -r -d '' __vj_last || :; } <"$__vj_file"; fi  # of set -e
    if [[ $__vj_last != "$*" ]]; then __vj_count=0; fi
    builtin printf '%s\n%s' "$((__vj_count + 1))" "$*" >"$__vj_file"
    if ((__vj_count == 50)); then __vj_tell loop "$*" && : >"$__VJ/stop"; fi
} 2>/dev/null
__vj_tell() {  # a note: its kind, its text, and the line
    local __vj_at=1
    while [[ ${BASH_SOURCE[__vj_at]-} == "$__VJ/prelude" ]]; do ((__vj_at++)); done
    builtin printf '%s\0' "$1" "$2" "${BASH_SOURCE[__vj_at]-}" "${BASH_LINENO[__vj_at - 1]}" >>"$__VJ/notes"
}
__vj_file() {  # where a file lies that the script writes
    __vj_tell write "$1"
    if builtin test -n "$1"; then builtin printf %s "$__VJ/out/${1##*/}"; else builtin printf /dev/null; fi
}
__vj_filter() {  # a filter of text: of what nobody knows before the job it makes what nobody knows
    local __vj_status=0 __vj_in= __vj_out __vj_word __vj_token='@(OUT|ARG|UNSET|ENV)[^@[:space:]]*@'
    if [[ $#$1 == 1cat ]]; then builtin command cat; return; fi
    for __vj_word in "${@:2}"; do
        if builtin test -f "$__vj_word"; then builtin command "$@"; return; fi
    done
    if [[ -p /dev/stdin ]]; then IFS= builtin read -r -N 65536 __vj_in; fi
    if [[ $__vj_in =~ $__vj_token ]]; then
        __vj_token=${BASH_REMATCH[0]}
        __vj_out=$(builtin printf %s "$__vj_in" | builtin command "$@") || __vj_status=$?
        if [[ $__vj_token == @OUT:nvidia-smi@ && $__vj_out == [0-9]* ]]; then __vj_token=; fi  # a count
        if [[ $__vj_out != *"$__vj_token"* ]]; then __vj_out=$__vj_token; fi
        builtin printf '%s\n' "$__vj_out"
        return "$__vj_status"
    fi
    if [[ -n $__vj_in ]]; then { builtin printf %s "$__vj_in"; builtin command cat; } | builtin command "$@"
    else builtin command "$@"; fi || __vj_status=$?
    case $1:$__vj_status in
    *:0 | *grep:1 | *awk:1 | *:???) ;;
    *) builtin printf '@OUT:%s@\n' "$1" ;;  # it cannot read its file
    esac
    return "$__vj_status"
}
for __vj_word in awk cat cut egrep fold gawk grep head mawk nl paste rev sed sort tac tail uniq wc; do
    builtin eval "$__vj_word() { __vj_filter $__vj_word \"\$@\"; }"
done
xargs() {  # its input may be what nobody knows before the job
    local __vj_mark=@OUT:xargs@ __vj_for= __vj_word
    while [[ $1 == -* ]]; do
        case $1 in
        -I) __vj_for=$2; shift 2 ;;
        -I*) __vj_for=${1#-I}; shift ;;
        -i | --replace) __vj_for={}; shift ;;
        --replace=*) __vj_for=${1#*=}; shift ;;
        -[adELnPs] | --arg-file | --delimiter | --max-args | --max-chars | --max-procs) shift 2 ;;
        *) shift ;;
        esac
    done
    if (($# == 0)); then  # it puts its input on one line
        builtin read -r -d '' -t 1 -a __vj_word
        builtin printf '%s\n' "${__vj_word[*]}"
        return 0
    fi
    if [[ -n $__vj_for ]]; then set -- "${@//"$__vj_for"/$__vj_mark}"; else set -- "$@" "$__vj_mark"; fi
    if [[ $1 == */* ]]; then __vj_call "$@"; else "$@"; fi
}
command_not_found_handle() { __vj_call "$@"; }
exec() {
    if [[ $1 == -[cl] ]]; then shift; elif [[ $1 == -a ]]; then shift 2; fi
    if builtin test $# -eq 0; then return 0; fi
    __vj_call "$@"
    builtin exit 0
}
command() {
    case $1 in
    -v | -V) builtin printf '%s\n' "$2" ;;
    -p) shift; "$@" ;;
    *) "$@" ;;
    esac
}
which() { builtin printf '%s\n' "$1"; }
cd() {
    local __vj_to=${1:-$HOME} __vj_was=$PWD __vj_head
    if [[ $__vj_to == -- || $__vj_to == -[LP] ]]; then __vj_to=$2; fi
    if [[ $__vj_to == - ]]; then __vj_to=$OLDPWD; fi
    if [[ $__vj_to != /* ]]; then __vj_to=$PWD/$__vj_to; fi
    builtin cd "$__vj_to" 2>/dev/null || {  # a folder that is not here: the name alone
        while [[ $__vj_to == */./* ]]; do __vj_to=${__vj_to/\/.\///}; done
        while [[ $__vj_to/ == *?/../* ]]; do
            __vj_head=${__vj_to%%/..*}
            __vj_to=${__vj_head%/*}${__vj_to#"$__vj_head"/..}
        done
        __vj_to=${__vj_to%/.} PWD=${__vj_to%/}
        __vj_tell cd "$PWD"
    }
    OLDPWD=$__vj_was
}
pushd() { __vj_stack+=("$PWD"); cd "$@"; }
popd() { if ((${#__vj_stack[@]})); then cd "${__vj_stack[-1]}"; builtin unset '__vj_stack[-1]'; fi; }
pwd() { builtin printf '%s\n' "$PWD"; }
source() {
    local __vj_path=$1 __vj_own=$__VJ_FOLDER/${1##*/}
    shift
    if [[ $__vj_path == */* ]] || builtin test -f "$__vj_path"; then  # else bash looks in PATH
        if [[ $__vj_path != [/@]* ]]; then __vj_path=$PWD/$__vj_path; fi
    fi
    if [[ $__vj_path == /dev/fd/* || $__vj_path == /proc/* ]]; then
        if [[ -p $__vj_path ]]; then builtin source "$__vj_path" "$@"; return; fi
    elif builtin test ! -f "$__vj_path" -a -f "$__vj_own"; then
        __vj_path=$__vj_own  # it is started elsewhere, beside the same file
    fi
    if [[ $__vj_path == "$__VJ_FOLDER"/* ]] && builtin test -f "$__vj_path" && (: <"$__vj_path") 2>/dev/null; then
        __vj_tell source "$__vj_path"
        builtin source "$__vj_path" "$@"
    else
        __vj_call source "$__vj_path" "$@" >/dev/null
    fi
}
.() { source "$@"; }
[() {  # a file that this machine does not have: answered as this pass says
    local __vj_words=("$@")
    case $1$2 in
    -[defrswxL]* | !-[defrswxL]*)
        if [[ $1 == '!' ]] && ((${#__vj_words[@]} > 4)) || [[ $1 != '!' ]] && ((${#__vj_words[@]} > 3)); then
            builtin [ "$@"
            return
        fi
        if builtin test -e "${__vj_words[-2]}"; then builtin [ "$@"; return; fi
        __vj_tell file "${__vj_words[-2]}"
        if ((__VJ_FILES)); then builtin test "$1" != '!'; else builtin test "$1" = '!'; fi
        return ;;
    esac
    builtin [ "$@"
}
test() { [ "$@" ]; }
for __vj_word in mkdir trap ulimit umask; do  # what they print is no output of the lines around them
    builtin eval "$__vj_word() { __vj_call $__vj_word \"\$@\" >/dev/null; }"
done
tee() {
    local __vj_word __vj_files=()
    for __vj_word; do if [[ $__vj_word != -* ]]; then __vj_files+=("$(__vj_file "$__vj_word")"); fi; done
    builtin command tee "${__vj_files[@]}"
}
kill() { if [[ $1 != -0 ]]; then __vj_call kill "$@" >/dev/null; fi; }
unset() {  # of what the script did not set, the program would have had a value
    local __vj_word
    for __vj_word; do
        if [[ $__vj_word == @([A-Z]*|*_proxy) && -z ${__vj_set[$__vj_word]-} ]]; then __vj_call unset "$__vj_word" >/dev/null; fi
    done
    builtin unset "$@"
}
sleep() { __vj_tell sleep "sleep $*"; }
clear() { :; }
nc() { return 1; }  # nobody listens at a port: it is free
enable() { :; }
hash() { :; }
scontrol() {
    local __vj_at __vj_all=  # one write: with pipefail, `| head -1` must not end it
    case "$*" in
    *hostname*)
        for ((__vj_at = 0; __vj_at < ${SLURM_NNODES:-2}; __vj_at++)); do __vj_all+="@NODE$__vj_at@"$'\n'; done
        builtin printf %s "$__vj_all" ;;
    *) __vj_call scontrol "$@" ;;
    esac
}
hostname() {
    case $1 in
    -I | --all-ip*) builtin printf '@IP%s@ \n' "$__VJ_RANK" ;;
    -i | --ip*) builtin printf '@IP%s@\n' "$__VJ_RANK" ;;
    *) builtin printf '@NODE%s@\n' "$__VJ_RANK" ;;
    esac
}
getent() { builtin printf '@IP0@ @NODE0@\n'; }
nvidia-smi() {
    local __vj_at
    if [[ $1 == -* && " $*" =~ \ -(pm|pl|ac|rac|lgc|rgc|lmc|rmc|c|r|mig|-(persistence|power-limit|compute|gpu-reset|lock|reset|applications|auto-boost)) ]]; then
        __vj_call nvidia-smi "$@" >/dev/null  # it changes the device
    fi
    for ((__vj_at = 0; __vj_at < __VJ_GPUS; __vj_at++)); do builtin printf 'GPU %s: @OUT:nvidia-smi@\n' "$__vj_at"; done
}
nproc() { builtin printf '%s\n' "$__VJ_CPUS"; }
shuf() { builtin printf '@OUT:shuf@\n'; }
whoami() { builtin printf '%s\n' "$USER"; }
logname() { whoami; }
uname() { builtin printf 'Linux\n'; }
date() {  # of the moment at which the script is read
    local __vj_word="date $*" __vj_time=$__VJ_TIME
    __vj_tell once "$__vj_word"
    if [[ ${__vj_word% } == "$__VJ_DRAWN" ]]; then __vj_time=$((__vj_time + 40000000)); fi  # all its parts differ
    case "$#$1" in
    1+*) builtin printf "%(${1#+})T\n" "$__vj_time" ;;
    0) builtin printf '%(%a %b %e %H:%M:%S %Z %Y)T\n' "$__vj_time" ;;
    *) builtin printf '@OUT:date@\n' ;;
    esac
}
mktemp() { builtin printf '@OUT:mktemp@\n'; }
srun() {  # a question about a node is answered, all else is a launch
    case " $* " in
    *" hostname "*-I* | *" hostname --all-ip"*) builtin printf '@IP0@ \n' ;;
    *" hostname "*-i* | *" hostname --ip"*) builtin printf '@IP0@\n' ;;
    *" hostname "*) builtin printf '@NODE0@\n' ;;
    *) __vj_call srun "$@" ;;
    esac
}
__vj_debug() {  # before each command: where variables are set; a path gets a function of its name
    if [[ ${BASH_SOURCE[1]-} == "$__VJ/prelude" ]]; then return 0; fi
    local __vj_line=$BASH_COMMAND __vj_word __vj_more __vj_length  # no =~ here: BASH_REMATCH is the script's
    if [[ -e $__VJ/stop ]]; then builtin exit 0; fi
    if [[ $PATH != "$__VJ/bin" ]]; then export __VJ_PATH=$PATH PATH=$__VJ/bin; fi
    case $__vj_line in '[[ '*-[defrswx]' '*) __vj_tell condition "$__vj_line" ;; esac
    if [[ $__vj_line == *=* ]]; then
        __vj_word=${__vj_line%%=*} __vj_word=${__vj_word%+}
        case $__vj_word in export\ * | declare\ * | local\ * | readonly\ * | typeset\ *) __vj_word=${__vj_word##* } ;; esac
        if [[ $__vj_word == [A-Za-z_]* && $__vj_word != *[!A-Za-z0-9_]* ]]; then
            __vj_set[$__vj_word]="${BASH_SOURCE[1]-}"$'\n'"${BASH_LINENO[0]}"
        fi
    fi
    while [[ ${__vj_line%%[[:space:]]*} == [A-Za-z_]*=* ]]; do
        if [[ $__vj_line != *[[:space:]]* ]]; then return 0; fi
        __vj_line=${__vj_line#*[[:space:]]}
    done
    __vj_word=${__vj_line%%[[:space:]]*}
    if [[ $__vj_word != *[/\$~]* || $__vj_word == *[!A-Za-z0-9_./:@+{}~\$\"\'-]* ]]; then return 0; fi
    __vj_more=${__vj_word//[!\"\']/}  # a syntax error in eval would end bash
    case $__vj_more in
    '') ;;
    '""') [[ $__vj_word == \"* ]] || return 0 ;;
    "''") [[ $__vj_word == \'*\' ]] || return 0 ;;
    *) return 0 ;;
    esac
    if [[ $__vj_word == *[{}]* ]]; then
        if [[ $__vj_word == *[!\$]\{* || $__vj_word == \{* ]]; then return 0; fi
        __vj_more=${__vj_word//\}/} __vj_length=${#__vj_more} __vj_more=${__vj_word//[!\{]/}
        if [[ ${#__vj_more} != $((${#__vj_word} - __vj_length)) ]]; then return 0; fi
    fi
    builtin eval "__vj_word=( $__vj_word )" 2>/dev/null || return 0
    if [[ $__vj_word != */* || $__vj_word == *[!A-Za-z0-9_./@+:-]* ]]; then return 0; fi
    builtin eval "function $__vj_word { __vj_call '$__vj_word' \"\$@\"; }" 2>/dev/null
    return 0
}
__vj_end() {  # what the script set, when it is over; what it left running may still record
    local __vj_at
    for ((__vj_at = 0; __vj_at < 20; __vj_at++)); do
        if [[ -z $(jobs -rp) ]]; then break; fi
        builtin read -r -t 0.02 <> <(:)
    done 2>/dev/null
    {
        builtin declare -p
        builtin printf '\0'
        for __vj_word in "${!__vj_set[@]}"; do builtin printf '%s\0' "$__vj_word"$'\n'"${__vj_set[$__vj_word]}"; done
    } >"$__VJ/variables" 2>/dev/null
}
declare -A __vj_set
declare -a __vj_stack
if ((__VJ_GLOBS)); then shopt -s nullglob; fi
builtin set -T
builtin trap __vj_end EXIT
builtin trap __vj_debug DEBUG
