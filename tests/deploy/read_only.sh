# read_only.sh WRITABLE... -- KEPT... -- COMMAND...: runs COMMAND as user 10001 on a root that it cannot write to, as a
# confined pod does. WRITABLE folders are there, empty; KEPT ones can be read although their parents are private.
# Needs root and a mount namespace of its own (unshare -m).
set -eu
mount --make-rprivate /
root=$(mktemp -d)
mount -t tmpfs none "$root"
writable=
while [ "$1" != -- ]; do writable="$writable $1"; shift; done
shift
for entry in /*; do
    case " $writable " in *" $entry "*) continue ;; esac
    if [ -L "$entry" ]; then
        cp -a "$entry" "$root$entry"
    elif [ -d "$entry" ] && [ "$(stat -c %A "$entry" | cut -c10)" != - ]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
        case $entry in /dev | /proc | /sys) ;; *) mount -o remount,bind,ro "$root$entry" ;; esac
    fi
done
for folder in $writable; do
    mkdir -p "$root$folder"
    mount -t tmpfs -o mode=1777 none "$root$folder"
done
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
    shift
done
shift
mount -o remount,ro "$root"
exec chroot --userspec=10001:10001 "$root" "$@"
